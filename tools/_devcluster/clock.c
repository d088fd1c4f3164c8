/* The clock of a node: a library to preload, with the machine's wall clock plus an offset in
   seconds, which the file $DEVCLUSTER_CLOCK holds. Monotonic clocks and sleeps stay as they are.
   (libfaketime passes semaphores of one node to the processes of others, and fails sleeps.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int (*real_clock)(clockid_t, struct timespec *);

static long offset(void) {
  static __thread long offset_s, read_at = -1; /* per thread: no locks, also after a fork */
  struct timespec now;
  if (!real_clock) real_clock = REAL(clock_gettime);
  real_clock(CLOCK_MONOTONIC, &now);
  long tenths = now.tv_sec * 10 + now.tv_nsec / 100000000;
  if (tenths == read_at) return offset_s;
  read_at = tenths;
  char text[32] = "0", *path = getenv("DEVCLUSTER_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    /* Empty while it is written: as before. */
    if (size > 0) { text[size] = 0; offset_s = atol(text); }
  }
  return offset_s;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  if (!real_clock) real_clock = REAL(clock_gettime);
  int failed = real_clock(clock, time);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += offset();
  return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

/* The kernel's clock has no offset: a deadline by the node's clock, as the kernel knows it. */
static struct timespec machine(const struct timespec *deadline) {
  struct timespec changed = *deadline;
  if (changed.tv_sec > 1000000000) changed.tv_sec -= offset(); /* no monotonic one */
  return changed;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  struct timespec changed = machine(deadline);
  return REAL(pthread_cond_timedwait)(condition, mutex, &changed);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  struct timespec changed = machine(deadline);
  return REAL(sem_timedwait)(semaphore, &changed);
}
