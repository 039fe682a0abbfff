// Runs the part of the Metal Shading Language that the kernels use on a CPU: a fiber a GPU thread,
// the 32 lanes of a simdgroup in lock-step at every simdgroup operation, simdgroups and
// threadgroups in the order that a seed asks for.
//
// No header of the C or C++ library that names functions of numbers is included: those names would
// stand beside Metal's, and reading them would be most of a build's time.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <sys/mman.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace msl {

// ---- What the host and the kernels share -------------------------------------------------------

struct Buffer {
  const char* name;
  void* data;
  uint32_t* touched;  // an access count per element
  long size;          // in elements
};

struct Size {
  uint x, y, z;
  uint volume() const { return x * y * z; }
};

struct Launch {
  Size grid, group;  // both in threads
  int order;         // how simd_sum adds: 0 from lane 0, 1 as a tree, 2 from lane 31
  int seed;          // see `Schedule`
};

struct Stats {
  long barriers, collectives;
};

struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// ---- Fibers ------------------------------------------------------------------------------------

constexpr uint LANES = 32;
constexpr uint MOST_THREADS = 1024;
constexpr size_t SHARED_LIMIT = 32768;  // bytes of threadgroup memory
// An odd number of cache lines, so that equal depths of 32 stacks do not meet in one cache set.
constexpr size_t STACK = (64 << 10) + 13 * 64;
constexpr uint64_t CANARY = 0x5afe57ac5afe57acu;

// Runs once all live lanes have arrived; payload[lane] is what the lane brought, and takes back.
typedef void Combine(void* const* payload, uint32_t active, Site site);

struct Fiber {
  jmp_buf context;
  bool entered;
  Site site;
  Combine* combine;  // what it waits for: a collective, or (null) the threadgroup barrier
  uint flags;        // of that barrier
};

struct Simdgroup {
  uint32_t live;  // lanes that have not returned
  bool at_barrier;
  uint32_t fence;  // clock of its last simdgroup_barrier over threadgroup memory
  void* payload[LANES];
};

struct Runtime {
  Launch launch;
  Size groups, group;  // threadgroups in the grid; the threadgroup that runs
  Stats stats;
  void (*body)(const Buffer*);
  const Buffer* buffers;
  char error[512];
  bool failed;

  jmp_buf scheduler;
  char* stacks;
  Fiber fibers[MOST_THREADS];
  Simdgroup simdgroups[MOST_THREADS / LANES];
  uint threads;
  uint current;        // the thread that runs
  uchar lanes[LANES];  // the order of this turn's lanes, and the one that runs
  uint turn, turns;

  uint32_t clock;  // rises at every barrier that orders threadgroup memory
  uint32_t epoch;  // clock of the last threadgroup barrier
  uint32_t birth;  // clock of the threadgroup's start
  uint launches;
  size_t shared_bytes;  // of threadgroup memory that this launch declared
  uint64_t random;
};
static Runtime runtime;

inline uint lane() { return runtime.current % LANES; }
inline Simdgroup& simdgroup() { return runtime.simdgroups[runtime.current / LANES]; }

__attribute__((format(printf, 1, 2))) static void set_error(const char* format, ...) {
  if (runtime.failed) return;
  runtime.failed = true;
  __builtin_va_list values;
  __builtin_va_start(values, format);
  __builtin_vsnprintf(runtime.error, sizeof runtime.error, format, values);
  __builtin_va_end(values);
}

[[noreturn]] static void fiber_main();

// Goes on with a fiber; one that has not begun does so on its own stack.
[[noreturn]] static void enter(uint thread) {
  Fiber& fiber = runtime.fibers[thread];
  runtime.current = thread;
  if (fiber.entered) _longjmp(fiber.context, 1);
  fiber.entered = true;
  char* bottom = runtime.stacks + thread * STACK;
  __builtin_memcpy(bottom, &CANARY, sizeof CANARY);
#if defined(__x86_64__)
  asm volatile("movq %0, %%rsp\n\txorl %%ebp, %%ebp\n\tcall *%1"
               ::"r"(bottom + STACK), "r"(fiber_main) : "memory");
#elif defined(__aarch64__)
  asm volatile("mov sp, %0\n\tmov x29, xzr\n\tblr %1"
               ::"r"(bottom + STACK), "r"(fiber_main) : "memory");
#else
#error "say here how this processor changes stacks"
#endif
  __builtin_unreachable();
}

// To the next lane of this turn, or back to the scheduler.
[[noreturn]] static void leave() {
  if (runtime.failed || ++runtime.turn == runtime.turns) _longjmp(runtime.scheduler, 1);
  enter(runtime.current / LANES * LANES + runtime.lanes[runtime.turn]);
}

[[noreturn]] static void abandon() { _longjmp(runtime.scheduler, 1); }
#define MSL_FAIL(...) (msl::set_error(__VA_ARGS__), msl::abandon())

static void check_stack() {
  if (__builtin_memcmp(runtime.stacks + runtime.current * STACK, &CANARY, sizeof CANARY) != 0)
    MSL_FAIL("thread %u has variables of more than %zu bytes", runtime.current, STACK);
}

// Threadgroup memory changes meanwhile: nothing may be concluded from what this function does.
__attribute__((noinline, noipa)) static void wait() {
  asm volatile("" ::: "memory");
  check_stack();
  if (!_setjmp(runtime.fibers[runtime.current].context)) leave();
}

[[noreturn]] static void fiber_main() {
  for (;;) {
    runtime.body(runtime.buffers);
    simdgroup().live &= ~(1u << lane());
    wait();
  }
}

__attribute__((noinline)) static void meet(Combine* combine, void* payload, Site site) {
  Fiber& fiber = runtime.fibers[runtime.current];
  fiber.combine = combine;
  fiber.site = site;
  simdgroup().payload[lane()] = payload;
  wait();
}

// ---- The scheduler -----------------------------------------------------------------------------

// Which simdgroup runs next, in which order its lanes and the threadgroups run.
struct Schedule {
  enum { FIRST_AHEAD = -2, LAST_AHEAD = -1, ROUND_ROBIN = 0 };  // above 0: at random

  static uint random(uint below) {
    uint64_t& state = runtime.random;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return uint((state >> 32) * below >> 32);
  }
  template <class T> static void shuffle(T* items, uint count) {
    for (uint i = count; i > 1; i--) {
      uint j = random(i);
      T item = items[i - 1];
      items[i - 1] = items[j], items[j] = item;
    }
  }
  // Ascending, descending or shuffled.
  template <class T> static void arrange(T* items, uint count) {
    for (uint i = 0; i < count; i++)
      items[i] = T(runtime.launch.seed == LAST_AHEAD ? count - 1 - i : i);
    if (runtime.launch.seed > 0) shuffle(items, count);
  }
  // The next simdgroup after `last` among those that can go on; -1 if none can.
  static int next(uint count, int last) {
    int ready[MOST_THREADS / LANES], found = 0;
    for (uint g = 0; g < count; g++)
      if (runtime.simdgroups[g].live && !runtime.simdgroups[g].at_barrier) ready[found++] = int(g);
    if (!found) return -1;
    if (runtime.launch.seed > 0) return ready[random(uint(found))];
    if (runtime.launch.seed == LAST_AHEAD) return ready[found - 1];
    if (runtime.launch.seed == ROUND_ROBIN)
      for (int i = 0; i < found; i++)
        if (ready[i] > last) return ready[i];
    return ready[0];
  }
};

// Runs the simdgroup's live lanes up to where each waits next, then lets them through if they can.
static void run_turn(uint index) {
  Runtime& r = runtime;
  Simdgroup& group = r.simdgroups[index];
  uchar order[LANES];
  Schedule::arrange(order, LANES);
  r.turns = 0;
  for (uint i = 0; i < LANES; i++)
    if (group.live >> order[i] & 1) r.lanes[r.turns++] = order[i];
  r.turn = 0;
  if (!_setjmp(r.scheduler)) enter(index * LANES + r.lanes[0]);
  if (r.failed || !group.live) return;

  const Fiber* fibers = r.fibers + index * LANES;
  const Fiber& first = fibers[__builtin_ctz(group.live)];
  for (uint i = 0; i < LANES; i++) {
    const Fiber& other = fibers[i];
    if ((group.live >> i & 1) == 0) continue;
    if (other.combine != first.combine || other.site.line != first.site.line ||
        other.site.file != first.site.file)
      return set_error(
          "divergent: lanes of one simdgroup wait at %s:%d (lane %d) and at %s:%d (lane %u)",
          first.site.file, first.site.line, __builtin_ctz(group.live), other.site.file,
          other.site.line, i);
  }
  if (first.combine == nullptr) {
    group.at_barrier = true;
    return;
  }
  r.stats.collectives++;
  first.combine(group.payload, group.live, first.site);
}

// Lets every simdgroup through the threadgroup barrier that all of them must have reached.
static void pass_barrier(uint count) {
  Runtime& r = runtime;
  const Fiber& first = r.fibers[0];
  uint waiting = 0, thread = 0;
  for (uint g = 0; g < count; g++) {
    if (r.simdgroups[g].at_barrier) thread = g * LANES + __builtin_ctz(r.simdgroups[g].live);
    waiting += __builtin_popcount(r.simdgroups[g].live);
  }
  if (waiting != r.threads) {
    const Site& site = r.fibers[thread].site;
    return set_error("%s:%d: threadgroup_barrier, but %u of %u threads have returned", site.file,
                     site.line, r.threads - waiting, r.threads);
  }
  for (uint g = 0; g < count; g++) {
    const Fiber& other = r.fibers[g * LANES];
    if (other.site.line != first.site.line || other.site.file != first.site.file)
      return set_error("divergent: simdgroups 0 and %u wait at different barriers, %s:%d and %s:%d",
                       g, first.site.file, first.site.line, other.site.file, other.site.line);
    r.simdgroups[g].at_barrier = false;
  }
  r.stats.barriers++;
  if (first.flags & 2) r.epoch = ++r.clock;
}

static void run_threadgroup() {
  Runtime& r = runtime;
  const uint count = (r.threads + LANES - 1) / LANES;
  r.birth = r.epoch = ++r.clock;
  for (uint g = 0; g < count; g++) {
    Simdgroup& group = r.simdgroups[g];
    const uint lanes = r.threads - g * LANES;
    group.live = lanes < LANES ? (1u << lanes) - 1 : ~0u;
    group.at_barrier = false;
    group.fence = r.clock;
  }
  int last = -1;
  for (;;) {
    last = Schedule::next(count, last);
    if (last >= 0) {
      run_turn(uint(last));
    } else {
      bool waiting = false;
      for (uint g = 0; g < count; g++) waiting |= r.simdgroups[g].at_barrier;
      if (!waiting) return;
      pass_barrier(count);
    }
    if (r.failed) return;
  }
}

// Null, or what went wrong.
static const char* run(void (*body)(const Buffer*), const Buffer* buffers, const Launch& launch,
                       Stats* stats) {
  Runtime& r = runtime;
  const Size &grid = launch.grid, &group = launch.group;
  r.launch = launch;
  r.body = body;
  r.buffers = buffers;
  r.stats = {};
  r.failed = false;
  r.launches++;
  r.shared_bytes = 0;
  r.threads = group.volume();
  r.random = 0x9e3779b97f4a7c15u * uint64_t(launch.seed + 1) | 1;
  r.groups = {grid.x / group.x, grid.y / group.y, grid.z / group.z};
  if (r.stacks == nullptr) {
    // Thread 0 has room below its stack, too, so that one too deep is found and not a crash.
    const size_t below = 64 * STACK;
    void* stacks = mmap(nullptr, below + MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stacks == MAP_FAILED) return "no memory for the threads' stacks";
    r.stacks = static_cast<char*>(stacks) + below;
  }
  const uint count = r.groups.volume();
  uint* order = static_cast<uint*>(__builtin_malloc(count * sizeof(uint)));
  Schedule::arrange(order, count);
  for (uint i = 0; i < count && !r.failed; i++) {
    const uint at = order[i];
    r.group = {at % r.groups.x, at / r.groups.x % r.groups.y, at / r.groups.x / r.groups.y};
    run_threadgroup();
    if (r.failed) {
      const size_t length = __builtin_strlen(r.error);
      __builtin_snprintf(r.error + length, sizeof r.error - length, " (threadgroup %u, %u, %u)",
                         r.group.x, r.group.y, r.group.z);
      // What is left on the stacks is never gone on with.
      for (Fiber& fiber : r.fibers) fiber.entered = false;
    }
  }
  __builtin_free(order);
  *stats = r.stats;
  return r.failed ? r.error : nullptr;
}

// ---- Scalars -----------------------------------------------------------------------------------

template <class To, class From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between different sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

struct HalfFormat {
  static float widen(uint16_t bits) {
    uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
    // The product moves the exponent's bias from 15 to 127, and normalises what was subnormal.
    float value = bits_as<float>(magnitude) * 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00) value = bits_as<float>(magnitude | 0x7f800000);
    return bits_as<float>(bits_as<uint32_t>(value) | uint32_t(bits & 0x8000) << 16);
  }
  static uint16_t narrow(float value) {
    uint32_t bits = bits_as<uint32_t>(value);
    const uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000)  // subnormal: the sum puts the unit of half's last place at bit 0
      return sign | uint16_t(bits_as<uint32_t>(bits_as<float>(bits) + 0.5f) - 0x3f000000);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | uint16_t((bits - 0x38000000) >> 13);
  }
};
struct BfloatFormat {
  static float widen(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }
  static uint16_t narrow(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

// Two of a kind give their kind, rounded to nearest even; beside a float it is a float.
template <class Format> struct Small {
  uint16_t bits;
  Small() = default;
  Small(float value) : bits(Format::narrow(value)) {}
  Small(double value) : Small(float(value)) {}
  Small(int value) : Small(float(value)) {}
  Small(uint value) : Small(float(value)) {}
  Small(long value) : Small(float(value)) {}
  Small(ulong value) : Small(float(value)) {}
  Small(bool value) : Small(float(value)) {}
  template <class Other> explicit Small(Small<Other> other) : Small(float(other)) {}
  operator float() const { return Format::widen(bits); }
  friend Small operator-(Small a) { return bits_as<Small>(uint16_t(a.bits ^ 0x8000)); }
#define MSL_OPERATOR(op)                                                              \
  friend Small operator op(Small a, Small b) { return Small(float(a) op float(b)); }  \
  friend float operator op(Small a, float b) { return float(a) op b; }                \
  friend float operator op(float a, Small b) { return a op float(b); }                \
  friend Small operator op(Small a, int b) { return Small(float(a) op float(b)); }    \
  friend Small operator op(int a, Small b) { return Small(float(a) op float(b)); }    \
  friend Small operator op(Small a, uint b) { return Small(float(a) op float(b)); }   \
  friend Small operator op(uint a, Small b) { return Small(float(a) op float(b)); }   \
  Small& operator op##=(float b) { return *this = Small(float(*this) op b); }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
};

// ---- Short vectors -----------------------------------------------------------------------------

template <class T, int N> struct Vector;
#define MSL_INDEX                                  \
  T& operator[](int i) { return (&x)[i]; }         \
  const T& operator[](int i) const { return (&x)[i]; }
template <class T> struct alignas(2 * sizeof(T)) Vector<T, 2> {
  T x, y;
  Vector() = default;
  Vector(T a) : x(a), y(a) {}
  Vector(T a, T b) : x(a), y(b) {}
  template <class U> explicit Vector(const Vector<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
  MSL_INDEX
};
template <class T> struct alignas(4 * sizeof(T)) Vector<T, 3> {
  T x, y, z;
  Vector() = default;
  Vector(T a) : x(a), y(a), z(a) {}
  Vector(T a, T b, T c) : x(a), y(b), z(c) {}
  template <class U> explicit Vector(const Vector<U, 3>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  MSL_INDEX
};
template <class T> struct alignas(4 * sizeof(T)) Vector<T, 4> {
  T x, y, z, w;
  Vector() = default;
  Vector(T a) : x(a), y(a), z(a), w(a) {}
  Vector(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  Vector(Vector<T, 2> a, Vector<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <class U>
  explicit Vector(const Vector<U, 4>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  MSL_INDEX
};
#undef MSL_INDEX
template <class T> struct Same { typedef T type; };
#define MSL_OPERATOR(op)                                                                  \
  template <class T, int N>                                                               \
  inline Vector<T, N> operator op(Vector<T, N> a, const Vector<T, N>& b) {                \
    for (int i = 0; i < N; i++) a[i] = a[i] op b[i];                                      \
    return a;                                                                             \
  }                                                                                       \
  template <class T, int N>                                                               \
  inline Vector<T, N> operator op(const Vector<T, N>& a, typename Same<T>::type b) {      \
    return a op Vector<T, N>(b);                                                          \
  }                                                                                       \
  template <class T, int N>                                                               \
  inline Vector<T, N> operator op(typename Same<T>::type a, const Vector<T, N>& b) {      \
    return Vector<T, N>(a) op b;                                                          \
  }                                                                                       \
  template <class T, int N, class U>                                                      \
  inline Vector<T, N>& operator op##=(Vector<T, N>& a, const U& b) {                      \
    return a = a op b;                                                                    \
  }
MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
MSL_OPERATOR(&) MSL_OPERATOR(|) MSL_OPERATOR(^) MSL_OPERATOR(>>) MSL_OPERATOR(<<)
#undef MSL_OPERATOR
template <class T, int N> inline Vector<T, N> operator-(Vector<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = -a[i];
  return a;
}

}  // namespace msl

typedef msl::Small<msl::HalfFormat> half;
typedef msl::Small<msl::BfloatFormat> bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

// Calls its argument with every scalar type of a kind.
#define MSL_FLOATS(X) X(float) X(half) X(bfloat)
#define MSL_WHOLES(X) X(int) X(uint) X(short) X(ushort) X(char) X(uchar) X(long) X(ulong)
#define MSL_SCALARS(X) MSL_FLOATS(X) MSL_WHOLES(X) X(bool)

#define MSL_VECTORS(T)            \
  typedef msl::Vector<T, 2> T##2; \
  typedef msl::Vector<T, 3> T##3; \
  typedef msl::Vector<T, 4> T##4;
MSL_SCALARS(MSL_VECTORS)
#undef MSL_VECTORS

// ---- Pointers ----------------------------------------------------------------------------------

namespace msl {

template <class T> struct Element {
  typedef T& type;
};
template <class T> struct Element<const T> {
  typedef T type;
};

// The pointer to an input (of const) or output: it counts uses of an element, and knows the bounds.
// It becomes no other pointer, and an input's element has no address: no load goes uncounted.
template <class T> class Pointer {
  const Buffer* buffer;
  long index;
  Pointer(const Buffer* buffer, long index) : buffer(buffer), index(index) {}

 public:
  explicit Pointer(const Buffer& buffer) : Pointer(&buffer, 0) {}
  typename Element<T>::type operator[](long i) const {
    const long at = index + i;
    if (ulong(at) >= ulong(buffer->size))
      MSL_FAIL("%s is used at %ld, it has %ld elements", buffer->name, at, buffer->size);
    buffer->touched[at]++;
    return static_cast<T*>(buffer->data)[at];
  }
  typename Element<T>::type operator*() const { return (*this)[0]; }
  Pointer operator+(long i) const { return {buffer, index + i}; }
  Pointer operator-(long i) const { return {buffer, index - i}; }
  long operator-(const Pointer& other) const { return index - other.index; }
  Pointer& operator+=(long i) { return index += i, *this; }
  Pointer& operator-=(long i) { return index -= i, *this; }
  Pointer& operator++() { return index++, *this; }
  Pointer operator++(int) { return {buffer, index++}; }
};

// ---- Threadgroup memory ------------------------------------------------------------------------

// Who used an element last, and when: two uses by different threads, one of them a write, need a
// barrier between them. Clocks of another threadgroup's time count as never.
struct Trace {
  uint32_t written, read;
  uint16_t writer, reader;
};
constexpr uint16_t MANY = 0xffff, MANY_IN_SIMDGROUP = 0x8000;

// Whether a use at `clock` by `other` (a thread, or the threads of its simdgroup) comes before
// what the current thread does now.
inline bool ordered(uint32_t clock, uint16_t other) {
  if (clock < runtime.epoch || other == runtime.current) return true;
  if (other == MANY) return false;
  const uint group = other & MANY_IN_SIMDGROUP ? other & ~MANY_IN_SIMDGROUP : other / LANES;
  return group == runtime.current / LANES && clock < runtime.simdgroups[group].fence;
}

struct SharedBlock {
  const char* name;
  long size;
};

[[noreturn, gnu::noinline, gnu::cold]] static void race(const char* what, const SharedBlock* block,
                                                        long index, uint16_t other) {
  char who[64];
  if (other == MANY)
    __builtin_snprintf(who, sizeof who, "threads of several simdgroups");
  else if (other & MANY_IN_SIMDGROUP)
    __builtin_snprintf(who, sizeof who, "threads of simdgroup %u", other & ~MANY_IN_SIMDGROUP);
  else
    __builtin_snprintf(who, sizeof who, "thread %u", other);
  MSL_FAIL("race: thread %u %s %s[%ld], which %s used, with no barrier between", runtime.current,
           what, block->name, index, who);
}

// What `shared[i]` gives. A variable made of it by `auto` keeps the value that was there, as in
// Metal; only the expression itself can be assigned to.
template <class T> class SharedReference {
  const SharedBlock* block;
  T* value;
  Trace* trace;
  long index;
  T seen;
  uint32_t clock, written;
  uint16_t writer;
  bool raced;

  void will_write(const T& next) {
    const uint16_t me = uint16_t(runtime.current);
    // Threads may write the same value side by side.
    if (!ordered(trace->written, trace->writer) && __builtin_memcmp(value, &next, sizeof(T)) != 0)
      race("writes", block, index, trace->writer);
    if (!ordered(trace->read, trace->reader)) race("writes", block, index, trace->reader);
    trace->written = runtime.clock;
    trace->writer = me;
  }
  void has_read() const {
    if (written < runtime.birth)
      MSL_FAIL("%s[%ld] is read before any thread wrote it", block->name, index);
    if (raced) race("reads", block, index, writer);
    const uint16_t me = uint16_t(runtime.current);
    if (trace->read > clock) return;
    if (ordered(trace->read, trace->reader))
      trace->reader = me;
    else if (trace->reader != MANY) {
      const uint16_t all = MANY_IN_SIMDGROUP | me / LANES;
      const bool same = trace->reader == all ||
                        (trace->reader < MANY_IN_SIMDGROUP && trace->reader / LANES == me / LANES);
      trace->reader = same ? all : MANY;
    }
    trace->read = clock;
  }

 public:
  SharedReference(const SharedBlock* block, T* value, Trace* trace, long index)
      : block(block), value(value), trace(trace), index(index), seen(*value),
        clock(runtime.clock), written(trace->written), writer(trace->writer),
        raced(!ordered(trace->written, trace->writer)) {}
  SharedReference(const SharedReference&) = default;

  operator T() const { return has_read(), seen; }
  template <class U> explicit operator U() const { return U(T(*this)); }
  void operator=(const T& next) && { will_write(next), *value = next; }
  void operator=(const SharedReference& next) && {
    const T copy = next;
    will_write(copy), *value = copy;
  }
  template <class U> void operator=(const U&) & = delete;
#define MSL_OPERATOR(op) \
  template <class U> void operator op##=(const U& other) && { \
    const T next = T(T(*this) op other);                      \
    will_write(next), *value = next;                          \
  }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/) MSL_OPERATOR(|)
#undef MSL_OPERATOR
  auto operator&() const;
};

// `threadgroup T*`.
template <class T> class SharedPointer {
 protected:
  const SharedBlock* block;
  T* values;
  Trace* traces;
  long index;

 public:
  SharedPointer(const SharedBlock* block, T* values, Trace* traces, long index)
      : block(block), values(values), traces(traces), index(index) {}
  SharedReference<T> operator[](long i) const {
    const long at = index + i;
    if (ulong(at) >= ulong(block->size))
      MSL_FAIL("%s is used at %ld, it has %ld elements", block->name, at, block->size);
    return {block, values + at, traces + at, at};
  }
  SharedReference<T> operator*() const { return (*this)[0]; }
  SharedPointer operator+(long i) const { return {block, values, traces, index + i}; }
  SharedPointer operator-(long i) const { return {block, values, traces, index - i}; }
  SharedPointer& operator+=(long i) { return index += i, *this; }
  SharedPointer& operator-=(long i) { return index -= i, *this; }
};
template <class T> inline auto SharedReference<T>::operator&() const {
  return SharedPointer<T>(block, value - index, trace - index, index);
}

// A `threadgroup` array, or a row of one.
template <class T, long... sizes> struct SharedArray;
template <class T> struct SharedArray<T> : private SharedPointer<T> {  // `threadgroup T name`
  using SharedPointer<T>::SharedPointer;
  operator T() const { return (*this)[0]; }
  void operator=(const T& value) { (*this)[0] = value; }
  SharedPointer<T> operator&() const { return *this; }
};
template <class T, long size> struct SharedArray<T, size> : SharedPointer<T> {
  using SharedPointer<T>::SharedPointer;
};
template <class T, long size, long next, long... rest>
struct SharedArray<T, size, next, rest...> : private SharedPointer<T> {
  using SharedPointer<T>::SharedPointer;
  SharedArray<T, next, rest...> operator[](long i) const {
    if (ulong(i) >= ulong(size))
      MSL_FAIL("%s is used at row %ld of %ld", this->block->name, i, size);
    const long row = next * (rest * ... * 1);
    return {this->block, this->values, this->traces, this->index + i * row};
  }
};

// What such a declaration makes: one for all threadgroups, which run one after another.
template <class T, long... sizes> class Shared : public SharedArray<T, sizes...> {
  static constexpr long SIZE = (sizes * ... * 1);
  SharedBlock owner;
  T storage[SIZE];
  Trace uses[SIZE];
  uint launch = 0;

 public:
  explicit Shared(const char* name)
      : SharedArray<T, sizes...>(&owner, storage, uses, 0), owner{name, SIZE}, uses{} {}
  template <class U> void operator=(const U& value) { SharedArray<T, sizes...>::operator=(value); }
  // Counts the array's bytes, once a launch.
  void declare() {
    if (launch == runtime.launches) return;
    launch = runtime.launches;
    runtime.shared_bytes += sizeof storage;
    if (runtime.shared_bytes > SHARED_LIMIT)
      MSL_FAIL("%zu bytes of threadgroup memory, there are %zu", runtime.shared_bytes,
               SHARED_LIMIT);
  }
};

}  // namespace msl

// ---- What lanes do together --------------------------------------------------------------------

namespace msl {

// Reductions over the active lanes.
template <class F, class T> inline T reduce(T value, Site site) {
  meet(
      [](void* const* payload, uint32_t active, Site) {
        T values[LANES];
        uint count = 0;
        for (uint i = 0; i < LANES; i++)
          if (active >> i & 1) values[count++] = *static_cast<T*>(payload[i]);
        T result;
        if (runtime.launch.order == 1 && count == LANES) {
          for (uint half = count / 2; half; half /= 2)
            for (uint i = 0; i < half; i++) values[i] = F::of(values[i], values[i + half]);
          result = values[0];
        } else if (runtime.launch.order == 2) {
          result = values[count - 1];
          for (uint i = count - 1; i-- > 0;) result = F::of(result, values[i]);
        } else {
          result = values[0];
          for (uint i = 1; i < count; i++) result = F::of(result, values[i]);
        }
        for (uint i = 0; i < LANES; i++)
          if (active >> i & 1) *static_cast<T*>(payload[i]) = result;
      },
      &value, site);
  return value;
}

template <class T> struct Shuffle {
  T value, taken;
  uint from;
};
// Every lane takes the value of lane `from`, which must be active.
template <class T> inline T take(T value, uint from, Site site) {
  Shuffle<T> shuffle = {value, value, from};
  meet(
      [](void* const* payload, uint32_t active, Site site) {
        for (uint i = 0; i < LANES; i++) {
          if ((active >> i & 1) == 0) continue;
          Shuffle<T>& mine = *static_cast<Shuffle<T>*>(payload[i]);
          if (mine.from >= LANES || (active >> mine.from & 1) == 0)
            return set_error("%s:%d: lane %u takes a value from lane %u, which is not active",
                             site.file, site.line, i, mine.from);
          mine.taken = static_cast<Shuffle<T>*>(payload[mine.from])->value;
        }
      },
      &shuffle, site);
  return shuffle.taken;
}
inline uint first_lane() { return uint(__builtin_ctz(simdgroup().live)); }

// Each lane holds two neighbours of a row. Which, MLX's own kernels rely on (steel/gemm/mma.h).
struct MatrixPlace {
  uint row, column;
  constexpr explicit MatrixPlace(uint lane)
      : row((lane / 4 & 4) + lane / 2 % 4), column((lane / 4 & 2) * 2 + lane % 2 * 2) {}
};
inline void all_lanes(Site site) {
  meet(
      [](void* const*, uint32_t active, Site site) {
        if (active != ~0u)
          set_error("%s:%d: needs all 32 lanes of the simdgroup", site.file, site.line);
      },
      nullptr, site);
}
// What a lane brings to a product, and its two elements of the result.
struct Product {
  float a[2], b[2], sum[2];
};
inline void multiply(Product& mine, Site site) {
  meet(
      [](void* const* payload, uint32_t active, Site site) {
        if (active != ~0u)
          return set_error("%s:%d: needs all 32 lanes of the simdgroup", site.file, site.line);
        float a[8][8], b[8][8], sum[8][8];
        for (uint i = 0; i < LANES; i++) {
          const MatrixPlace at(i);
          const Product& lane = *static_cast<const Product*>(payload[i]);
          for (uint k = 0; k < 2; k++) {
            a[at.row][at.column + k] = lane.a[k];
            b[at.row][at.column + k] = lane.b[k];
            sum[at.row][at.column + k] = lane.sum[k];
          }
        }
        for (uint row = 0; row < 8; row++)
          for (uint k = 0; k < 8; k++)
            for (uint column = 0; column < 8; column++)
              sum[row][column] += a[row][k] * b[k][column];
        for (uint i = 0; i < LANES; i++) {
          const MatrixPlace at(i);
          for (uint k = 0; k < 2; k++)
            static_cast<Product*>(payload[i])->sum[k] = sum[at.row][at.column + k];
        }
      },
      &mine, site);
}

}  // namespace msl

// ---- Metal's library ---------------------------------------------------------------------------

template <class To, class From> inline To as_type(From from) { return msl::bits_as<To>(from); }
template <class To, class T> inline To as_type(msl::Pointer<T>) = delete;

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define M_PI_F 3.14159265358979f
inline half operator""h(long double value) { return half(float(value)); }

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

#define MSL_SITE msl::Site site = msl::Site::here()

inline void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::runtime.fibers[msl::runtime.current].flags = uint(flags);
  msl::meet(nullptr, nullptr, site);
}
inline void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::meet(
      [](void* const* payload, uint32_t active, msl::Site) {
        msl::Simdgroup& group = msl::simdgroup();
        if (uint(*static_cast<mem_flags*>(payload[__builtin_ctz(active)])) & 2)
          group.fence = ++msl::runtime.clock;
      },
      &flags, site);
}

#define MSL_REDUCTION(name, expression)                                    \
  struct name##_of {                                                       \
    template <class T> static T of(T a, T b) { return T(expression); }     \
  };                                                                       \
  template <class T, int N>                                                \
  inline msl::Vector<T, N> name(msl::Vector<T, N> v, MSL_SITE) {           \
    for (int i = 0; i < N; i++) v[i] = msl::reduce<name##_of>(v[i], site); \
    return v;                                                              \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a * b)
MSL_REDUCTION(simd_max, a < b ? b : a)
MSL_REDUCTION(simd_min, b < a ? b : a)
#undef MSL_REDUCTION
#define MSL_REDUCE(T, name) \
  inline T name(T v, MSL_SITE) { return msl::reduce<name##_of>(v, site); }
#define MSL_REDUCTIONS(T)                           \
  MSL_REDUCE(T, simd_sum) MSL_REDUCE(T, simd_product) \
  MSL_REDUCE(T, simd_max) MSL_REDUCE(T, simd_min)
MSL_FLOATS(MSL_REDUCTIONS) MSL_WHOLES(MSL_REDUCTIONS)
#undef MSL_REDUCTIONS
#undef MSL_REDUCE
inline bool simd_any(bool v, MSL_SITE) { return msl::reduce<simd_max_of>(uint(v), site); }
inline bool simd_all(bool v, MSL_SITE) { return msl::reduce<simd_min_of>(uint(v), site); }

// Where `down` and `up` have no lane to take from, a lane keeps its own value.
#define MSL_SHUFFLES_OF(HEAD, T)                                                               \
  HEAD T simd_shuffle(T v, ushort from, MSL_SITE) { return msl::take<T>(v, from, site); }      \
  HEAD T simd_broadcast(T v, ushort from, MSL_SITE) { return msl::take<T>(v, from, site); }    \
  HEAD T simd_broadcast_first(T v, MSL_SITE) { return msl::take<T>(v, msl::first_lane(), site); } \
  HEAD T simd_shuffle_xor(T v, ushort mask, MSL_SITE) {                                        \
    return msl::take<T>(v, msl::lane() ^ mask, site);                                          \
  }                                                                                            \
  HEAD T simd_shuffle_down(T v, ushort delta, MSL_SITE) {                                      \
    const uint from = msl::lane() + delta;                                                     \
    return msl::take<T>(v, from < msl::LANES ? from : msl::lane(), site);                      \
  }                                                                                            \
  HEAD T simd_shuffle_up(T v, ushort delta, MSL_SITE) {                                        \
    return msl::take<T>(v, msl::lane() >= delta ? msl::lane() - delta : msl::lane(), site);    \
  }
#define MSL_SHUFFLES(T) MSL_SHUFFLES_OF(inline, T)
MSL_SCALARS(MSL_SHUFFLES)
#define MSL_VECTOR msl::Vector<T, N>
#define MSL_TEMPLATE template <class T, int N> inline
MSL_SHUFFLES_OF(MSL_TEMPLATE, MSL_VECTOR)
#undef MSL_VECTOR
#undef MSL_TEMPLATE
#undef MSL_SHUFFLES
#undef MSL_SHUFFLES_OF

// ---- 8x8 matrices ------------------------------------------------------------------------------

template <class T, int Columns = 8, int Rows = 8> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "a simdgroup_matrix has 8 rows and 8 columns");
  msl::Vector<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) : elements(T(0)) {
    const msl::MatrixPlace at(msl::lane());
    if (at.row / 2 * 2 == at.column) elements[at.row % 2] = diagonal;
  }
  msl::Vector<T, 2>& thread_elements() { return elements; }
  const msl::Vector<T, 2>& thread_elements() const { return elements; }
};
template <class T, int Columns = 8, int Rows = 8>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> matrix;
  matrix.elements = msl::Vector<T, 2>(value);
  return matrix;
}
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                          const simdgroup_matrix<B>& b,
                                          const simdgroup_matrix<C>& c, MSL_SITE) {
  msl::Product mine = {{float(a.elements.x), float(a.elements.y)},
                       {float(b.elements.x), float(b.elements.y)},
                       {float(c.elements.x), float(c.elements.y)}};
  msl::multiply(mine, site);
  d.elements = {D(mine.sum[0]), D(mine.sum[1])};
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                               const simdgroup_matrix<B>& b, MSL_SITE) {
  msl::Product mine = {{float(a.elements.x), float(a.elements.y)},
                       {float(b.elements.x), float(b.elements.y)},
                       {0.0f, 0.0f}};
  msl::multiply(mine, site);
  d.elements = {D(mine.sum[0]), D(mine.sum[1])};
}
template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T>& matrix, P from, ulong row = 8, ulong2 origin = 0,
                           bool transposed = false, MSL_SITE) {
  msl::all_lanes(site);
  const msl::MatrixPlace at(msl::lane());
  for (uint i = 0; i < 2; i++) {
    const ulong r = transposed ? at.column + i : at.row, c = transposed ? at.row : at.column + i;
    matrix.elements[i] = from[long((origin.y + r) * row + origin.x + c)];
  }
}
template <class T, class P>
inline void simdgroup_store(const simdgroup_matrix<T>& matrix, P to, ulong row = 8,
                            ulong2 origin = 0, bool transposed = false, MSL_SITE) {
  msl::all_lanes(site);
  const msl::MatrixPlace at(msl::lane());
  for (uint i = 0; i < 2; i++) {
    const ulong r = transposed ? at.column + i : at.row, c = transposed ? at.row : at.column + i;
    to[long((origin.y + r) * row + origin.x + c)] = matrix.elements[i];
  }
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// ---- Functions of numbers ----------------------------------------------------------------------

// One overload a type, as in Metal: arguments of two types are ambiguous there, too.
#define MSL_COMPARED(T)                                                           \
  inline T min(T a, T b) { return b < a ? b : a; }                                \
  inline T max(T a, T b) { return a < b ? b : a; }                                \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }           \
  inline T select(T no, T yes, bool which) { return which ? yes : no; }           \
  inline T abs(T x) { return x < T(0) ? T(-x) : x; }
MSL_WHOLES(MSL_COMPARED)
#undef MSL_COMPARED
// The other number, where one is not a number.
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float clamp(float x, float low, float high) { return min(max(x, low), high); }
inline float select(float no, float yes, bool which) { return which ? yes : no; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float powr(float a, float b) { return __builtin_powf(a, b); }
inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float exp10(float x) { return __builtin_powf(10.0f, x); }
inline float fract(float x) { return x - __builtin_floorf(x); }
inline float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
inline float mix(float a, float b, float t) { return a + (b - a) * t; }
inline float divide(float a, float b) { return a / b; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
#define MSL_BUILTINS(X)                                                                       \
  X(exp, exp) X(exp2, exp2) X(log, log) X(log2, log2) X(log10, log10) X(log1p, log1p)         \
  X(expm1, expm1) X(erf, erf) X(sqrt, sqrt) X(sin, sin) X(cos, cos) X(tan, tan) X(tanh, tanh) \
  X(sinh, sinh) X(cosh, cosh) X(atan, atan) X(abs, fabs) X(fabs, fabs) X(floor, floor)        \
  X(ceil, ceil) X(trunc, trunc) X(rint, rint) X(round, round)
#define MSL_BUILTIN(name, builtin) \
  inline float name(float x) { return __builtin_##builtin##f(x); }
MSL_BUILTINS(MSL_BUILTIN)
#undef MSL_BUILTIN
// Of two bytes: computed in float and rounded.
#define MSL_UNARY(T, name) inline T name(T x) { return T(name(float(x))); }
#define MSL_OF_HALF(name, builtin) MSL_UNARY(half, name) MSL_UNARY(bfloat, name)
MSL_BUILTINS(MSL_OF_HALF)
#undef MSL_OF_HALF
#define MSL_SMALL(T)                                                              \
  MSL_UNARY(T, rsqrt) MSL_UNARY(T, exp10) MSL_UNARY(T, fract) MSL_UNARY(T, sign)  \
  inline T min(T a, T b) { return T(min(float(a), float(b))); }                   \
  inline T max(T a, T b) { return T(max(float(a), float(b))); }                   \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }           \
  inline T select(T no, T yes, bool which) { return which ? yes : no; }           \
  inline T pow(T a, T b) { return T(pow(float(a), float(b))); }                   \
  inline T fma(T a, T b, T c) { return T(fma(float(a), float(b), float(c))); }    \
  inline bool isnan(T x) { return isnan(float(x)); }                              \
  inline bool isinf(T x) { return isinf(float(x)); }                              \
  inline bool isfinite(T x) { return isfinite(float(x)); }
MSL_SMALL(half) MSL_SMALL(bfloat)
#undef MSL_SMALL
#undef MSL_UNARY
#define MSL_PRECISION(X)                                                            \
  inline float rsqrt(float x) { return metal::rsqrt(x); }                           \
  inline float exp10(float x) { return metal::exp10(x); }                           \
  inline float pow(float a, float b) { return metal::pow(a, b); }                   \
  inline float powr(float a, float b) { return metal::powr(a, b); }                 \
  inline float divide(float a, float b) { return a / b; }                           \
  MSL_BUILTINS(X)
#define MSL_SAME(name, builtin) \
  inline float name(float x) { return metal::name(x); }
namespace precise { MSL_PRECISION(MSL_SAME) }
namespace fast { MSL_PRECISION(MSL_SAME) }
#undef MSL_SAME
#undef MSL_PRECISION
#undef MSL_BUILTINS
template <class T, int N> inline T dot(msl::Vector<T, N> a, msl::Vector<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N> inline msl::Vector<T, N> fma(msl::Vector<T, N> a, msl::Vector<T, N> b,
                                                       msl::Vector<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
#define MSL_BITS(T)                                                              \
  inline T popcount(T x) {                                                       \
    return T(__builtin_popcountl(ulong(x) << (64 - 8 * sizeof x)));              \
  }                                                                              \
  inline T extract_bits(T x, uint offset, uint bits) {                           \
    if (bits == 0) return 0;                                                     \
    return T(T(x << (8 * sizeof x - offset - bits)) >> (8 * sizeof x - bits));   \
  }                                                                              \
  inline T insert_bits(T base, T x, uint offset, uint bits) {                    \
    const T mask = T(((1ul << bits) - 1) << offset);                             \
    return T((base & ~mask) | (T(x << offset) & mask));                          \
  }
MSL_WHOLES(MSL_BITS)
#undef MSL_BITS
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32; }
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float epsilon() { return 0x1p-23f; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
};
#define MSL_LIMITS(T, most, least, unit)                \
  template <> struct numeric_limits<T> {                \
    static T max() { return T(most); }                  \
    static T lowest() { return T(-most); }              \
    static T min() { return T(least); }                 \
    static T epsilon() { return T(unit); }              \
    static T infinity() { return T(INFINITY); }         \
    static T quiet_NaN() { return T(NAN); }             \
  };
MSL_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
MSL_LIMITS(bfloat, 0x1.fep127f, FLT_MIN, 0x1p-7f)
#undef MSL_LIMITS
#define MSL_LIMITS(T)                                                                           \
  template <> struct numeric_limits<T> {                                                        \
    static constexpr T min() { return T(-1) < T(0) ? T(1ul << (8 * sizeof(T) - 1)) : T(0); }    \
    static constexpr T lowest() { return min(); }                                               \
    static constexpr T max() { return T(~min()); }                                              \
  };
MSL_WHOLES(MSL_LIMITS)
#undef MSL_LIMITS
#undef MSL_SITE

}  // namespace metal
using namespace metal;

// ---- A kernel's arguments ----------------------------------------------------------------------

namespace msl {
inline Size thread_in_group() {
  const Size& group = runtime.launch.group;
  const uint i = runtime.current;
  return {i % group.x, i / group.x % group.y, i / group.x / group.y};
}
inline uint3 vector(Size size) { return {size.x, size.y, size.z}; }
inline uint3 thread_position_in_threadgroup() { return vector(thread_in_group()); }
inline uint3 threadgroup_position_in_grid() { return vector(runtime.group); }
inline uint3 threads_per_threadgroup() { return vector(runtime.launch.group); }
inline uint3 threadgroups_per_grid() { return vector(runtime.groups); }
inline uint3 threads_per_grid() { return vector(runtime.launch.grid); }
inline uint3 grid_size() { return vector(runtime.launch.grid); }
inline uint3 thread_position_in_grid() {
  return threadgroup_position_in_grid() * threads_per_threadgroup() +
         thread_position_in_threadgroup();
}
inline uint thread_index_in_threadgroup() { return runtime.current; }
inline uint thread_index_in_simdgroup() { return lane(); }
inline uint simdgroup_index_in_threadgroup() { return runtime.current / LANES; }
inline uint threads_per_simdgroup() { return LANES; }
inline uint thread_execution_width() { return LANES; }
inline uint simdgroups_per_threadgroup() { return (runtime.threads + LANES - 1) / LANES; }
}  // namespace msl

// ---- From here on, Metal's own words -----------------------------------------------------------

// Address spaces are erased; `threadgroup` was written as msl::Shared and msl::SharedPointer.
#define device
#define constant
#define thread
#define METAL_FUNC inline
#define __METAL__ 1
#define __METAL_VERSION__ 320
