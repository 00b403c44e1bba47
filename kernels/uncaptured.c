#include "kernels/uncaptured.h"

#include <stdlib.h>

struct ps_graph {
    enum ps_status (*body)(void *argument);
    void *argument;
};

static enum ps_status capture(struct ps_device *d, enum ps_status (*body)(void *argument), void *argument, struct ps_graph **graph)
{
    (void)d;
    *graph = malloc(sizeof **graph);
    if (*graph == NULL) {
        return ps_fail(PS_DEVICE, "not enough memory for a graph (%zu bytes)", sizeof **graph);
    }
    **graph = (struct ps_graph){.body = body, .argument = argument};
    return PS_OK;
}

static enum ps_status replay(struct ps_device *d, struct ps_graph *graph)
{
    d->counters.launches++;
    return graph->body(graph->argument);
}

static void graph_nodes(struct ps_device *d, const struct ps_graph *graph, struct ps_graph_nodes *nodes)
{
    (void)d, (void)graph;
    *nodes = (struct ps_graph_nodes){0};
}

static void graph_destroy(struct ps_device *d, struct ps_graph *graph)
{
    (void)d;
    free(graph);
}

void ps_device_uncapture(struct ps_device *device)
{
    device->capture = capture;
    device->replay = replay;
    device->graph_nodes = graph_nodes;
    device->graph_destroy = graph_destroy;
}
