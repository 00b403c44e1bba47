#include "src/heartbeat.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "src/clock.h"

#define BEAT_SECONDS 0.5
#define CONNECT_SECONDS 2.0 /* for one address, and for its answer */
#define HELLO_SECONDS 10.0  /* for all ranks */

enum { ADDRESSES = 16, HOST = 64 };

/* What a rank says: that it lives, that it leaves, that it ends all by other means, or that all are to end since one is gone. */
enum word { BEAT = 'b', LEAVE = 'l', QUIET = 'q', END = 'e' };

/* Where rank 0 listens, by what it knows the others, and in token[2] by what they know it: another host may have its address. */
struct place {
    uint64_t token[3];
    uint32_t address[ADDRESSES];
    uint16_t port; /* 0: nowhere */
    int addresses;
};

struct hello {
    uint64_t token[2];
    int32_t rank;
};

/* The other end of a connection: of rank 0 each rank, of the others rank 0. */
struct peer {
    int rank;
    int fd; /* -1: not watched */
    double heard;
};

struct ps_heartbeat {
    int rank, size, peers;
    struct peer *peer;
    char (*host)[HOST]; /* [size] */
    struct pollfd *poll;
    int wake[2]; /* a pipe: its end tells the thread to stop */
    pthread_t thread;
    int started;
    atomic_int told; /* why all end: this process says no more */
};

static int all_on_one_host(const struct ps_heartbeat *h)
{
    for (int r = 1; r < h->size; r++) {
        if (memcmp(h->host[0], h->host[r], HOST) != 0) {
            return 0;
        }
    }
    return 1;
}

/* ---- connecting ---- */

static struct sockaddr_in address_of(uint32_t address, uint16_t port)
{
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = address, .sin_port = htons(port)};
}

/* A socket that listens, for ranks of this host alone where there are no others; -1: none, and place has no port. */
static int listen_at(const struct ps_heartbeat *h, struct place *place)
{
    memset(place, 0, sizeof *place);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), alone = all_on_one_host(h);
    struct sockaddr_in address = address_of(htonl(alone ? INADDR_LOOPBACK : INADDR_ANY), 0);
    socklen_t length = sizeof address;
    if (fd < 0 || getrandom(place->token, sizeof place->token, 0) != sizeof place->token ||
        bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, h->size) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &length) != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    place->port = ntohs(address.sin_port);
    struct ifaddrs *all = NULL;
    if (!alone && getifaddrs(&all) == 0) {
        for (const struct ifaddrs *one = all; one && place->addresses < ADDRESSES; one = one->ifa_next) {
            if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && one->ifa_flags & IFF_UP &&
                !(one->ifa_flags & IFF_LOOPBACK)) {
                struct sockaddr_in here;
                memcpy(&here, one->ifa_addr, sizeof here);
                place->address[place->addresses++] = here.sin_addr.s_addr;
            }
        }
        freeifaddrs(all);
    }
    return fd;
}

/* Whether fd is ready for `events` within that time. */
static int ready_within(int fd, short events, double seconds)
{
    const double end = ps_seconds() + seconds;
    for (double left = seconds; left > 0; left = end - ps_seconds()) {
        struct pollfd one = {.fd = fd, .events = events};
        const int n = poll(&one, 1, (int)(1e3 * left) + 1);
        if (n > 0 || (n < 0 && errno != EINTR)) {
            return n > 0;
        }
    }
    return 0;
}

/* Whether `bytes` come over fd in time. */
static int receives(int fd, void *to, size_t bytes)
{
    return ready_within(fd, POLLIN, CONNECT_SECONDS) && recv(fd, to, bytes, 0) == (ssize_t)bytes;
}

static int connect_to(uint32_t address, const struct place *place, const struct hello *hello)
{
    uint64_t answer;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_in to = address_of(address, place->port);
    int error = 0;
    socklen_t length = sizeof error;
    if (fd >= 0 && (connect(fd, (struct sockaddr *)&to, sizeof to) == 0 || errno == EINPROGRESS) &&
        ready_within(fd, POLLOUT, CONNECT_SECONDS) && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && !error &&
        send(fd, hello, sizeof *hello, MSG_NOSIGNAL) == (ssize_t)sizeof *hello && receives(fd, &answer, sizeof answer) &&
        answer == place->token[2]) {
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

/* This rank's connection to rank 0; -1: no address answers. */
static int find_first(const struct ps_heartbeat *h, const struct place *place)
{
    const struct hello hello = {.token = {place->token[0], place->token[1]}, .rank = h->rank};
    int fd = -1;
    if (place->port && memcmp(h->host[0], h->host[h->rank], HOST) == 0) {
        fd = connect_to(htonl(INADDR_LOOPBACK), place, &hello);
    }
    for (int i = 0; i < place->addresses && fd < 0; i++) {
        fd = connect_to(place->address[i], place, &hello);
    }
    return fd;
}

/* Of rank 0: the others' connections, as far as they come. */
static void accept_all(struct ps_heartbeat *h, int listening, const struct place *place)
{
    const double end = ps_seconds() + HELLO_SECONDS;
    int expected = h->peers;
    while (expected > 0 && ready_within(listening, POLLIN, end - ps_seconds())) {
        const int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct hello hello;
        if (fd < 0) {
            continue;
        }
        if (receives(fd, &hello, sizeof hello) && memcmp(hello.token, place->token, sizeof hello.token) == 0 && hello.rank > 0 &&
            hello.rank < h->size && h->peer[hello.rank - 1].fd < 0 &&
            send(fd, &place->token[2], sizeof place->token[2], MSG_NOSIGNAL) == (ssize_t)sizeof place->token[2]) {
            h->peer[hello.rank - 1].fd = fd;
            expected--;
        } else {
            close(fd);
        }
    }
}

static void warn_unwatched(const struct ps_heartbeat *h)
{
    for (int i = 0; i < h->peers; i++) {
        if (h->peer[i].fd < 0) {
            const int r = h->peer[i].rank;
            fprintf(stderr,
                    "%s: warning: rank %d on %s cannot reach rank 0 on %s by TCP: what starts the ranks has to notice when it is "
                    "gone\n",
                    program_invocation_short_name, r, h->host[r], h->host[0]);
            return;
        }
    }
}

/* ---- watching ---- */

static void tell(const struct ps_heartbeat *h, enum word word)
{
    const char byte = (char)word;
    for (int i = 0; i < h->peers; i++) {
        if (h->peer[i].fd >= 0) {
            (void)!send(h->peer[i].fd, &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    }
}

/* After a moment in which what started the ranks sees the end of the one that is gone before that of others: it then tells of that
 * one, and has its exit code. */
static _Noreturn void leave(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
    _exit(PS_DEVICE);
}

/* Ends this process, and by rank 0 the others; one of them says why: rank 0, or when it is the one that is gone rank 1. */
static _Noreturn void end_all(struct ps_heartbeat *h, const struct peer *gone, int silent)
{
    atomic_store(&h->told, 1);
    tell(h, END); /* the one that is gone too: it may only have been stopped */
    if (h->rank == (gone->rank > 0 ? 0 : 1)) {
        char why[128] = "its process was ended, by kill -9 or for want of memory";
        if (silent) {
            snprintf(why, sizeof why, "nothing was heard of it for %.0f s, it is stopped or its host is down", PS_SILENCE);
        }
        dprintf(STDERR_FILENO, "%s: rank %d on %s is gone: %s: go on from the last checkpoint with --resume\n",
                program_invocation_short_name, gone->rank, h->host[gone->rank], why);
    }
    leave();
}

/* What has come over a connection. 1: nobody is to be watched any more. */
static int hear(struct ps_heartbeat *h, struct peer *peer)
{
    char words[256];
    const ssize_t n = recv(peer->fd, words, sizeof words, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    if (n > 0 && memchr(words, END, (size_t)n)) {
        atomic_store(&h->told, 1);
        leave();
    }
    if (n > 0 && memchr(words, QUIET, (size_t)n)) {
        atomic_store(&h->told, 1);
        tell(h, QUIET);
        return 1;
    }
    if (n > 0 && !memchr(words, LEAVE, (size_t)n)) {
        peer->heard = ps_seconds();
        return 0;
    }
    if (n <= 0) {
        end_all(h, peer, 0);
    }
    close(peer->fd);
    peer->fd = -1;
    return 0;
}

static void *watch(void *argument)
{
    struct ps_heartbeat *h = argument;
    double said = 0, looked = ps_seconds();
    for (;;) {
        for (int i = 0; i < h->peers; i++) {
            h->poll[i] = (struct pollfd){.fd = h->peer[i].fd, .events = POLLIN};
        }
        h->poll[h->peers] = (struct pollfd){.fd = h->wake[0], .events = POLLIN};
        poll(h->poll, (nfds_t)h->peers + 1, (int)(1e3 * BEAT_SECONDS));
        const double now = ps_seconds();
        if (h->poll[h->peers].revents) {
            return NULL;
        }
        const int slept = now - looked > PS_SILENCE / 2; /* all of us may have been stopped together */
        looked = now;
        for (int i = 0; i < h->peers; i++) {
            struct peer *peer = &h->peer[i];
            if (h->poll[i].revents && hear(h, peer)) {
                return NULL;
            }
            peer->heard = slept ? now : peer->heard;
            if (peer->fd >= 0 && now - peer->heard > PS_SILENCE) {
                end_all(h, peer, 1);
            }
        }
        if (now - said >= BEAT_SECONDS / 2) {
            said = now;
            tell(h, BEAT);
        }
    }
}

/* ---- opening ---- */

static enum ps_status start(struct ps_heartbeat *h)
{
    if (pipe2(h->wake, O_CLOEXEC) != 0) {
        return ps_fail(PS_DEVICE, "ranks: no pipe: %s", strerror(errno));
    }
    for (int i = 0; i < h->peers; i++) {
        const int on = 1;
        h->peer[i].heard = ps_seconds();
        if (h->peer[i].fd >= 0) {
            setsockopt(h->peer[i].fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        }
    }
    sigset_t all, before; /* the thread inherits a full mask, so that signals reach the run loop */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&h->thread, NULL, watch, h);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    h->started = error == 0;
    return error ? ps_fail(PS_DEVICE, "ranks: the heartbeat's thread cannot be started: %s", strerror(error)) : PS_OK;
}

/* The hosts of all, rank 0's place, and the connections to it. */
static const char *connect_all(struct ps_heartbeat *h, const struct ps_transport *t)
{
    struct place place = {.port = 0};
    const char *error = t->gather(t->host, HOST, h->host);
    const int listening = !error && h->rank == 0 ? listen_at(h, &place) : -1;
    error = error ? error : t->broadcast(&place, sizeof place, 0);
    if (!error && h->rank > 0) {
        h->peer[0].fd = find_first(h, &place);
    }
    if (listening >= 0) {
        if (!error) {
            accept_all(h, listening, &place);
        }
        close(listening);
    }
    return error;
}

enum ps_status ps_heartbeat_open(const struct ps_transport *t, struct ps_heartbeat **heartbeat)
{
    struct ps_heartbeat *h = calloc(1, sizeof *h);
    const int peers = t->rank == 0 ? t->size - 1 : 1;
    if (h) {
        *h = (struct ps_heartbeat){.rank = t->rank,
                                   .size = t->size,
                                   .peers = peers,
                                   .peer = calloc((size_t)peers, sizeof *h->peer),
                                   .host = calloc((size_t)t->size, sizeof *h->host),
                                   .poll = calloc((size_t)peers + 1, sizeof *h->poll),
                                   .wake = {-1, -1}};
    }
    if (!h || !h->peer || !h->host || !h->poll) {
        ps_heartbeat_close(h, 0);
        return ps_fail(PS_DEVICE, "ranks: no memory");
    }
    for (int i = 0; i < peers; i++) {
        h->peer[i] = (struct peer){.rank = t->rank == 0 ? i + 1 : 0, .fd = -1};
    }
    const char *error = connect_all(h, t);
    enum ps_status status = error ? ps_fail(PS_DEVICE, "ranks: %s", error) : start(h);
    if (status != PS_OK) {
        ps_heartbeat_close(h, 0);
        return status;
    }
    if (t->rank == 0) {
        warn_unwatched(h);
    }
    *heartbeat = h;
    return PS_OK;
}

void ps_heartbeat_wait(const struct ps_heartbeat *h, double seconds)
{
    const double end = ps_seconds() + seconds;
    while (h && ps_seconds() < end) {
        if (atomic_load(&h->told)) {
            leave();
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

void ps_heartbeat_close(struct ps_heartbeat *h, int ends_all)
{
    if (!h) {
        return;
    }
    if (h->started) {
        close(h->wake[1]);
        h->wake[1] = -1;
        pthread_join(h->thread, NULL);
    }
    if (h->peer) {
        tell(h, ends_all ? QUIET : LEAVE);
    }
    for (int i = 0; i < h->peers && h->peer; i++) {
        if (h->peer[i].fd >= 0) {
            close(h->peer[i].fd);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (h->wake[i] >= 0) {
            close(h->wake[i]);
        }
    }
    free(h->peer);
    free(h->host);
    free(h->poll);
    free(h);
}
