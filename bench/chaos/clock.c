/* A wall clock that jumps: built as a shared object and preloaded, it adds to every reading the nanoseconds that stand
   in the file $CHAOS_CLOCK (8 bytes, mapped, so a jump is seen at once by all processes). Monotonic clocks and the
   kernel's own stamps (mtimes) keep the true time. Absolute deadlines are taken back before the kernel sees them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static int64_t jump(void) {
    static volatile int64_t *mapped = NULL;
    if (!mapped) {
        const char *path = getenv("CHAOS_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *found = file < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
        static int64_t none = 0;
        if (file >= 0) close(file);
        mapped = found == MAP_FAILED ? &none : (int64_t *)found;
    }
    return *mapped;
}

static void add(struct timespec *moment, int64_t nanoseconds) {
    int64_t whole = moment->tv_sec * SECOND + moment->tv_nsec + nanoseconds;
    moment->tv_sec = whole / SECOND;
    moment->tv_nsec = whole % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *moment) {
    int failed = (int)syscall(SYS_clock_gettime, clock, moment);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) add(moment, jump());
    return failed;
}

int gettimeofday(struct timeval *restrict moment, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    moment->tv_sec = precise.tv_sec;
    moment->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (seconds) *seconds = precise.tv_sec;
    return precise.tv_sec;
}

/* Deadlines after 2001 are of the wall clock; the monotonic one counts from the machine's start. */
static struct timespec true_deadline(const struct timespec *deadline) {
    struct timespec found = *deadline;
    if (found.tv_sec > SECOND) add(&found, -jump());
    return found;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static int (*real)(sem_t *, const struct timespec *) = NULL;
    struct timespec until = true_deadline(deadline);
    if (!real) real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    return real(semaphore, &until);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) = NULL;
    struct timespec until = true_deadline(deadline);
    if (!real)
        real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(
            RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    return real(condition, mutex, &until);
}
