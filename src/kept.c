#include "src/kept.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/files.h"

/* folder/last.h5, or folder/last-7.h5. */
static void plain_path(const struct ps_kept *kept, const char *kind, char path[PS_KEPT_PATH])
{
    snprintf(path, PS_KEPT_PATH, "%s/%s.h5", kept->folder, kind);
}

static void numbered_path(const struct ps_kept *kept, const char *kind, uint64_t number, char path[PS_KEPT_PATH])
{
    snprintf(path, PS_KEPT_PATH, "%s/%s-%" PRIu64 ".h5", kept->folder, kind, number);
}

void ps_kept_last(const struct ps_kept *kept, char path[PS_KEPT_PATH])
{
    plain_path(kept, "last", path);
}

void ps_kept_best(const struct ps_kept *kept, char path[PS_KEPT_PATH])
{
    plain_path(kept, "best", path);
}

static int descending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

/* The numbers of the folder's kind-NUMBER.h5, the highest first; malloc'ed. None where there is no folder. */
static enum ps_status list(const struct ps_kept *kept, const char *kind, uint64_t **numbers, int *n)
{
    *numbers = NULL;
    *n = 0;
    DIR *folder = opendir(kept->folder);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        uint64_t number;
        char scanned[16], name[64];
        if (sscanf(entry->d_name, "%15[a-z]-%" SCNu64, scanned, &number) != 2 || strcmp(scanned, kind) != 0) {
            continue;
        }
        snprintf(name, sizeof name, "%s-%" PRIu64 ".h5", kind, number);
        if (strcmp(entry->d_name, name) != 0) {
            continue;
        }
        uint64_t *longer = realloc(*numbers, ((size_t)*n + 1) * sizeof *longer);
        if (!longer) {
            free(*numbers);
            closedir(folder);
            return ps_fail(PS_CHECKPOINT, "%s: no memory to list it", kept->folder);
        }
        *numbers = longer;
        longer[(*n)++] = number;
    }
    if (folder) {
        closedir(folder);
    }
    if (*n > 0) {
        qsort(*numbers, (size_t)*n, sizeof **numbers, descending);
    }
    return PS_OK;
}

int ps_kept_any(const struct ps_kept *kept)
{
    char path[PS_KEPT_PATH];
    uint64_t *numbers;
    int n;
    ps_kept_last(kept, path);
    if (access(path, F_OK) == 0) {
        return 1;
    }
    if (list(kept, "last", &numbers, &n) != PS_OK) {
        return 1; /* the load that follows tells */
    }
    free(numbers);
    return n > 0;
}

enum ps_status ps_kept_weights(const char *run, char path[PS_KEPT_PATH])
{
    static const char *const kinds[] = {"best", "last"};
    struct ps_kept kept = {.keep_last = 1};
    if (snprintf(kept.folder, sizeof kept.folder, "%s/checkpoints", run) >= (int)sizeof kept.folder) {
        return ps_fail(PS_USAGE, "%.200s...: the path is too long", run);
    }
    for (int i = 0; i < 2; i++) {
        plain_path(&kept, kinds[i], path);
        if (access(path, F_OK) == 0) {
            return PS_OK;
        }
        uint64_t *numbers;
        int n;
        PS_TRY(list(&kept, kinds[i], &numbers, &n));
        if (n > 0) {
            numbered_path(&kept, kinds[i], numbers[0], path);
        }
        free(numbers);
        if (n > 0) {
            return PS_OK;
        }
    }
    return ps_fail(PS_CHECKPOINT, "%s: a folder without checkpoints/best.h5 or last.h5: name a run's folder, or a checkpoint", run);
}

enum ps_status ps_kept_named(const char **name, char path[PS_KEPT_PATH])
{
    struct stat about;
    if (stat(*name, &about) == 0 && S_ISDIR(about.st_mode)) {
        PS_TRY(ps_kept_weights(*name, path));
        *name = path;
    }
    return PS_OK;
}

/* ---- saving ---- */

/* Removes what is beyond `keep` files, and what is not older than the present one: it was damaged, or the run went back behind it.
 */
static enum ps_status prune(const struct ps_kept *kept, const char *kind, int64_t keep, uint64_t present)
{
    uint64_t *numbers;
    int n;
    int64_t left = keep - 1;
    enum ps_status status = list(kept, kind, &numbers, &n);
    for (int i = 0; i < n && status == PS_OK; i++) {
        if (numbers[i] >= present || left-- <= 0) {
            char path[PS_KEPT_PATH];
            numbered_path(kept, kind, numbers[i], path);
            status = ps_file_drop(PS_CHECKPOINT, path);
        }
    }
    free(numbers);
    return status;
}

enum ps_status ps_kept_save(struct ps_kept *kept, const struct ps_checkpoint *checkpoint)
{
    int is_best = !checkpoint->m;
    const char *kind = is_best ? "best" : "last";
    int64_t keep = is_best ? kept->keep_best : kept->keep_last;
    int *known = is_best ? &kept->best_known : &kept->last_known;
    uint64_t *present = is_best ? &kept->best_epoch : &kept->last_step, number = is_best ? checkpoint->epoch : checkpoint->step;
    char path[PS_KEPT_PATH], older[PS_KEPT_PATH];
    plain_path(kept, kind, path);
    if ((keep > 1 || is_best) && *known && *present != number) {
        numbered_path(kept, kind, *present, older);
        PS_TRY(ps_file_link(PS_CHECKPOINT, path, older));
    }
    PS_TRY(ps_checkpoint_save(path, checkpoint));
    *known = 1;
    *present = number;
    if (is_best) { /* the state on disk speaks of those before */
        kept->best_pruned = 0;
        return PS_OK;
    }
    PS_TRY(prune(kept, kind, keep, number));
    if (kept->best_known && !kept->best_pruned) {
        PS_TRY(prune(kept, "best", kept->keep_best, kept->best_epoch));
        kept->best_pruned = 1;
    }
    return PS_OK;
}

enum ps_status ps_kept_discard(struct ps_kept *kept)
{
    static const char *const kinds[] = {"last", "best"};
    for (int i = 0; i < 2; i++) {
        char path[PS_KEPT_PATH];
        PS_TRY(prune(kept, kinds[i], 1, 0));
        plain_path(kept, kinds[i], path);
        PS_TRY(ps_file_remove(PS_CHECKPOINT, path));
    }
    kept->last_known = kept->best_known = 0;
    return PS_OK;
}

/* ---- loading ---- */

/* best.h5 when it is of `epoch`, else best-EPOCH.h5. */
static int find_named_best(struct ps_kept *kept, uint64_t epoch, struct ps_resumption *r)
{
    char path[PS_KEPT_PATH];
    ps_kept_best(kept, path);
    kept->best_known = ps_checkpoint_load(path, &r->best) == PS_OK;
    if (kept->best_known) {
        kept->best_epoch = r->best.epoch;
        if (r->best.epoch == epoch) {
            return 1;
        }
        ps_checkpoint_free(&r->best);
    } else {
        snprintf(r->best_passed, sizeof r->best_passed, "%s", ps_error_message());
    }
    numbered_path(kept, "best", epoch, path);
    if (ps_checkpoint_load(path, &r->best) == PS_OK && r->best.epoch == epoch) {
        return 1;
    }
    ps_checkpoint_free(&r->best);
    return 0;
}

/* A state of the end of `epoch`: its weights are that epoch's. */
static int find_state(const struct ps_kept *kept, uint64_t epoch, const uint64_t *numbers, int n, struct ps_resumption *r)
{
    for (int i = -1; i < n; i++) {
        char path[PS_KEPT_PATH];
        if (i < 0) {
            ps_kept_last(kept, path);
        } else {
            numbered_path(kept, "last", numbers[i], path);
        }
        if (ps_checkpoint_load(path, &r->best) == PS_OK && r->best.epoch == epoch && r->best.cursor == 0) {
            return 1;
        }
        ps_checkpoint_free(&r->best);
    }
    return 0;
}

/* The best weights of r->last, or why there are none. */
static enum ps_status find_best(struct ps_kept *kept, const uint64_t *numbers, int n, struct ps_resumption *r)
{
    uint64_t epoch = r->last.best_epoch;
    if (epoch == 0 || find_named_best(kept, epoch, r) || find_state(kept, epoch, numbers, n, r)) {
        return PS_OK;
    }
    char path[PS_KEPT_PATH];
    ps_kept_best(kept, path);
    PS_TRY(ps_checkpoint_load(path, &r->best));
    if (r->best.epoch > epoch) {
        return PS_OK;
    }
    enum ps_status status = ps_fail(
        PS_CHECKPOINT, "%s: holds the weights of epoch %" PRIu64 ", and %s speaks of epoch %" PRIu64 ": put the right one back",
        path, r->best.epoch, r->path, epoch);
    ps_checkpoint_free(&r->best);
    return status;
}

enum ps_status ps_kept_load(struct ps_kept *kept, struct ps_resumption *r)
{
    memset(r, 0, sizeof *r);
    uint64_t *numbers;
    int n;
    PS_TRY(list(kept, "last", &numbers, &n));
    enum ps_status status = PS_CHECKPOINT;
    for (int i = -1; i < n && status != PS_OK; i++) {
        if (i < 0) {
            ps_kept_last(kept, r->path);
            if (n > 0 && access(r->path, F_OK) != 0) {
                continue; /* a crash came between two renamings, where files cannot have two names */
            }
        } else {
            numbered_path(kept, "last", numbers[i], r->path);
        }
        status = ps_checkpoint_load(r->path, &r->last);
        if (status == PS_OK) {
            kept->last_known = i < 0;
            kept->last_step = r->last.step;
            status = find_best(kept, numbers, n, r);
        }
        if (status != PS_OK) {
            ps_checkpoint_free(&r->last);
            if (!*r->passed) {
                snprintf(r->passed, sizeof r->passed, "%s", ps_error_message());
            }
        }
    }
    free(numbers);
    return status == PS_OK ? PS_OK : ps_fail(PS_CHECKPOINT, "%s", r->passed);
}

void ps_resumption_free(struct ps_resumption *r)
{
    ps_checkpoint_free(&r->last);
    ps_checkpoint_free(&r->best);
}
