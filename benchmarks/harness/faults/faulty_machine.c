/* The machine below a process, to be put between it and the C library with LD_PRELOAD: a disk that keeps after a power
 * cut only what was synced, that can be slow and full, and a clock that can jump. Made and used by machine.py.
 *
 * MACHINE_ROOT, or who calls machine_begin, names a directory; without it nothing changes:
 *   control       struct control below, shared with the bench
 *   live/         the files of the process; everything else on the machine is left alone
 *   synced/INODE  content of a file of live/ as of its last sync
 *   names/INODE   names in a directory of live/ that are on the disk: lines "INODE NAME", the last one of a name counts
 *   kept/INODE    a second link to what was unlinked or replaced, so that no inode number is used again
 *
 * A sync of a file makes its content and, where the file is new, its name durable, as ext4 and xfs do; a rename or an
 * unlink is durable from the next sync of the directory on. Directories are durable at once. Nothing is really synced:
 * only this model decides what is left. What a process writes by mmap is not seen (SQLite's -shm, which no one syncs).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t sync_ms;    /* how long a sync takes */
    int64_t full;       /* no file may grow */
    int64_t clock_ns;   /* added to the time of day */
    int64_t syncs;      /* how many there were */
    int64_t refused;    /* writes that found the disk full */
};

struct range { off_t from, to; };

/* A file as this process has changed it since its last sync. */
struct file {
    ino_t inode;
    int is_live, is_named;
    off_t shortest;     /* it was cut to this length since the last sync */
    size_t count, room;
    struct range *dirty;
};

enum { FILES = 4096 };

static char root[PATH_MAX], live[PATH_MAX];
static struct control *control;
static dev_t device;
static struct file files[FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static int (*real_clock)(clockid_t, struct timespec *);

static void hold(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

/* Run on the machine at this root from now on. */
void machine_begin(const char *given) {
    if (control || !realpath(given, root)) return;
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/control", root);
    snprintf(live, sizeof live, "%.*s/live/", PATH_MAX - 8, root);
    struct stat found;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || stat(live, &found) != 0) abort();
    void *shared = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) abort();
    close(fd);
    device = found.st_dev;
    pthread_atfork(hold, release, release);
    control = shared;
}

__attribute__((constructor)) static void begin(void) {
    real_write = REAL(write);
    real_pwrite = REAL(pwrite);
    real_clock = REAL(clock_gettime);
    const char *given = getenv("MACHINE_ROOT");
    if (given) machine_begin(given);
}

/* ---- which file */

static int is_below_live(const char *path) {
    char absolute[PATH_MAX];
    return realpath(path, absolute) && strncmp(absolute, live, strlen(live)) == 0;
}

/* The path of an open file or directory, with a slash at the end; 0 when it is not below live/. */
static int path_of(int fd, char path[PATH_MAX]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 2);
    if (length < 0) return 0;
    path[length] = '/';
    path[length + 1] = 0;
    return strncmp(path, live, strlen(live)) == 0;
}

/* The file's place in the table, under the lock; NULL for files elsewhere. `fd` may be -1 when it is known to be live. */
static struct file *file_of(ino_t inode, int fd) {
    for (size_t n = 0; n < FILES; n++) {
        struct file *file = &files[(inode + n) % FILES];
        if (file->inode == inode) return file->is_live ? file : NULL;
        if (file->inode == 0) {
            char path[PATH_MAX];
            file->inode = inode;
            file->is_live = fd < 0 || path_of(fd, path);
            file->shortest = LLONG_MAX;
            return file->is_live ? file : NULL;
        }
    }
    abort(); /* more files than a bench should have */
}

static int is_on_disk(int fd, struct stat *found) {
    return control && fstat(fd, found) == 0 && found->st_dev == device && S_ISREG(found->st_mode);
}

/* ---- what is not synced yet */

static void note_write(struct file *file, off_t from, off_t to) {
    if (file->count && file->dirty[file->count - 1].to == from) {
        file->dirty[file->count - 1].to = to;
        return;
    }
    if (file->count == file->room) {
        file->room = file->room ? 2 * file->room : 16;
        file->dirty = realloc(file->dirty, file->room * sizeof *file->dirty);
        if (!file->dirty) abort();
    }
    file->dirty[file->count++] = (struct range){from, to};
}

static void note_length(struct file *file, off_t length) {
    if (length < file->shortest) file->shortest = length;
}

static int is_refused(const struct stat *found, off_t end) {
    if (!__atomic_load_n(&control->full, __ATOMIC_RELAXED) || end <= found->st_size) return 0;
    __atomic_add_fetch(&control->refused, 1, __ATOMIC_RELAXED);
    errno = ENOSPC;
    return 1;
}

ssize_t write(int fd, const void *bytes, size_t size) {
    struct stat found;
    if (!real_write) real_write = REAL(write);
    if (!is_on_disk(fd, &found)) return real_write(fd, bytes, size);
    hold();
    struct file *file = file_of(found.st_ino, fd);
    ssize_t written = -1;
    if (!file || !is_refused(&found, found.st_size + (off_t)size)) {
        written = real_write(fd, bytes, size);
        if (file && written > 0) {
            off_t end = lseek(fd, 0, SEEK_CUR);
            note_write(file, end - written, end);
        }
    }
    int error = errno;
    release();
    errno = error;
    return written;
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    struct stat found;
    if (!real_pwrite) real_pwrite = REAL(pwrite);
    if (!is_on_disk(fd, &found)) return real_pwrite(fd, bytes, size, offset);
    hold();
    struct file *file = file_of(found.st_ino, fd);
    ssize_t written = -1;
    if (!file || !is_refused(&found, offset + (off_t)size)) {
        written = real_pwrite(fd, bytes, size, offset);
        if (file && written > 0) note_write(file, offset, offset + written);
    }
    int error = errno;
    release();
    errno = error;
    return written;
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off_t offset) { return pwrite(fd, bytes, size, offset); }

int ftruncate(int fd, off_t length) {
    struct stat found;
    int (*cut)(int, off_t) = REAL(ftruncate);
    if (!is_on_disk(fd, &found)) return cut(fd, length);
    hold();
    struct file *file = file_of(found.st_ino, fd);
    int failed = cut(fd, length);
    if (file && !failed) note_length(file, length);
    release();
    return failed;
}

int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }

int truncate(const char *path, off_t length) {
    struct stat found;
    int (*cut)(const char *, off_t) = REAL(truncate);
    if (!control || stat(path, &found) != 0 || !is_below_live(path)) return cut(path, length);
    hold();
    struct file *file = file_of(found.st_ino, -1);
    int failed = cut(path, length);
    if (file && !failed) note_length(file, length);
    release();
    return failed;
}

int truncate64(const char *path, off_t length) { return truncate(path, length); }

/* ---- the sync */

static int open_synced(ino_t inode) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/synced/%ju", root, (uintmax_t)inode);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) abort();
    return fd;
}

static void copy(int from, int to, off_t begin, off_t end) {
    char buffer[1 << 16];
    while (begin < end) {
        size_t wanted = end - begin < (off_t)sizeof buffer ? (size_t)(end - begin) : sizeof buffer;
        ssize_t got = pread(from, buffer, wanted, begin);
        if (got <= 0) return; /* cut meanwhile */
        if (real_pwrite(to, buffer, got, begin) != got) abort();
        begin += got;
    }
}

/* A new file's name goes to the disk with its first sync. */
static void name_file(int fd, ino_t inode) {
    char path[PATH_MAX], listing[PATH_MAX + 64], line[NAME_MAX + 64];
    struct stat parent;
    if (!path_of(fd, path)) return; /* unlinked: its path now says so */
    path[strlen(path) - 1] = 0;
    char *name = strrchr(path, '/');
    *name++ = 0;
    if (stat(path, &parent) != 0) return;
    snprintf(listing, sizeof listing, "%s/names/%ju", root, (uintmax_t)parent.st_ino);
    int names = open(listing, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (names < 0) abort();
    int length = snprintf(line, sizeof line, "%ju %s\n", (uintmax_t)inode, name);
    if (real_write(names, line, length) != length) abort();
    close(names);
}

/* What is dirty when the sync begins is on the disk when it ends. */
static void sync_file(int fd, const struct stat *begin, struct range *dirty, size_t count, off_t shortest) {
    struct stat synced;
    /* Closing a second descriptor of a file would drop SQLite's locks on it; Redis's log cannot be read by its own. */
    int is_readable = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_WRONLY;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int from = is_readable ? fd : open(link, O_RDONLY | O_CLOEXEC), to = open_synced(begin->st_ino);
    if (from < 0 || fstat(to, &synced) != 0) abort();
    int (*cut)(int, off_t) = REAL(ftruncate);
    off_t known = synced.st_size < shortest ? synced.st_size : shortest;
    if (known < synced.st_size && cut(to, known) != 0) abort();
    for (size_t n = 0; n < count; n++) copy(from, to, dirty[n].from, dirty[n].to);
    copy(from, to, known, begin->st_size); /* also what the C library's own streams wrote, which is not seen here */
    if (cut(to, begin->st_size) != 0) abort();
    close(to);
    if (!is_readable) close(from);
}

static void sync_directory(int fd, ino_t inode) {
    char link[64], listing[PATH_MAX + 64], fresh[PATH_MAX + 96];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    snprintf(listing, sizeof listing, "%s/names/%ju", root, (uintmax_t)inode);
    snprintf(fresh, sizeof fresh, "%s.%d", listing, (int)getpid());
    DIR *directory = opendir(link);
    FILE *names = fopen(fresh, "w");
    if (!directory || !names) abort();
    for (struct dirent *entry; (entry = readdir(directory));)
        if (entry->d_type == DT_REG) fprintf(names, "%ju %s\n", (uintmax_t)entry->d_ino, entry->d_name);
    closedir(directory);
    if (fclose(names) != 0 || REAL(rename)(fresh, listing) != 0) abort();
}

static int sync_fd(int fd, int (*elsewhere)(int)) {
    struct stat found;
    char path[PATH_MAX];
    if (!control || fstat(fd, &found) != 0 || found.st_dev != device) return elsewhere(fd);
    if (S_ISDIR(found.st_mode) && path_of(fd, path)) {
        hold();
        sync_directory(fd, found.st_ino);
        release();
        return 0;
    }
    hold();
    struct file *file = S_ISREG(found.st_mode) ? file_of(found.st_ino, fd) : NULL;
    if (!file) {
        release();
        return elsewhere(fd);
    }
    fstat(fd, &found);
    struct range *dirty = file->dirty;
    size_t count = file->count;
    off_t shortest = file->shortest;
    file->dirty = NULL;
    file->count = file->room = 0;
    file->shortest = LLONG_MAX;
    release();

    int64_t takes_ms = __atomic_load_n(&control->sync_ms, __ATOMIC_RELAXED);
    if (takes_ms) usleep(takes_ms * 1000);

    hold();
    sync_file(fd, &found, dirty, count, shortest);
    if (!file->is_named) name_file(fd, found.st_ino);
    file->is_named = 1;
    release();
    free(dirty);
    __atomic_add_fetch(&control->syncs, 1, __ATOMIC_RELAXED);
    return 0;
}

int fsync(int fd) { return sync_fd(fd, REAL(fsync)); }
int fdatasync(int fd) { return sync_fd(fd, REAL(fdatasync)); }

/* ---- names */

static void keep(const char *path) {
    struct stat found;
    char second[PATH_MAX + 64];
    if (!control || lstat(path, &found) != 0 || !S_ISREG(found.st_mode) || !is_below_live(path)) return;
    snprintf(second, sizeof second, "%s/kept/%ju", root, (uintmax_t)found.st_ino);
    if (link(path, second) != 0 && errno != EEXIST) abort();
}

int unlink(const char *path) {
    keep(path);
    return REAL(unlink)(path);
}

int rename(const char *from, const char *to) {
    keep(to);
    return REAL(rename)(from, to);
}

/* ---- the clock */

static int64_t jump_ns(void) { return control ? __atomic_load_n(&control->clock_ns, __ATOMIC_RELAXED) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock) real_clock = REAL(clock_gettime);
    int failed = real_clock(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && jump_ns()) {
        int64_t time_ns = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + jump_ns();
        now->tv_sec = time_ns / 1000000000;
        now->tv_nsec = time_ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec time;
    int failed = clock_gettime(CLOCK_REALTIME, &time);
    if (!failed) *now = (struct timeval){time.tv_sec, time.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *also) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (also) *also = now.tv_sec;
    return now.tv_sec;
}
