// What machine.h and ptx_host.h declare, the same for all kernels: compiled once, and linked to each.
#include "ptx_host.h"

namespace machine {

// --- fibers -------------------------------------------------------------------------------------------------------------

std::vector<Block> blocks;
Fiber* self;
Sync cluster_sync_state;
u32 cluster_alive;
bool late;
u32 shared_bytes;
int grid, block_size;
const char* given;
static std::vector<Fiber*> fibers;                      // kept for the next launch
static std::vector<std::function<void()>> under_way;    // copies that count at barriers
static std::unordered_set<size_t> stored;               // addresses of two bytes each, of a launch
static int running;
static jmp_buf scheduler, failed;
static char failure[256];
static void (*entry)();

static u64 random_state = 1;
static u32 below(u32 n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(random_state >> 33) % n;
}

[[noreturn]] void fail(const char* what) {
  snprintf(failure, sizeof failure, "%s (block %d, thread %d)", what, self ? self->block->index : -1, self ? self->thread : -1);
  _longjmp(failed, 1);
}

extern "C" {  // of -fsanitize=alignment, bounds and signed-integer-overflow
void __ubsan_handle_type_mismatch_v1_abort(void*, void*) { fail("a misaligned access"); }
void __ubsan_handle_out_of_bounds_abort(void*, void*) { fail("an index outside of an array"); }
void __ubsan_handle_add_overflow_abort(void*, void*, void*) { fail("a sum beyond its integer"); }
void __ubsan_handle_sub_overflow_abort(void*, void*, void*) { fail("a difference beyond its integer"); }
void __ubsan_handle_mul_overflow_abort(void*, void*, void*) { fail("a product beyond its integer"); }
void __ubsan_handle_negate_overflow_abort(void*, void*) { fail("a negative beyond its integer"); }
void __ubsan_handle_divrem_overflow_abort(void*, void*, void*) { fail("a quotient beyond its integer"); }
}

void yield() {
  if (!_setjmp(self->at)) _longjmp(scheduler, 1);
}
void release(Sync& s, u32 count) {
  if (count && s.arrived >= count) s.arrived = 0, s.generation++;
}
void wait_for(const Sync& s, u32 generation) {
  if (s.generation != generation) return;
  self->sync = &s, self->generation = generation;
  yield();
}
void meet(Sync& s, u32 count) {
  const u32 generation = s.generation;
  s.arrived++;
  release(s, count);
  wait_for(s, generation);
}

static bool ready(const Fiber& f) {
  if (f.sync) return f.sync->generation != f.generation;
  return !f.barrier || (*f.barrier & 1) != f.parity;
}
static void fiber_entry() {
  entry();
  self->done = true;
  Block& b = *self->block;
  Warp& w = b.warps[self->thread / 32];
  release(w.sync, --w.alive);
  release(b.all, --b.alive);
  release(cluster_sync_state, --cluster_alive);
  if (!self->products.empty()) fail("a thread left before its matrix instructions were done");
  _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void go_on(Fiber& f) {
  if (_setjmp(scheduler)) return;
  self = &f;
  f.sync = nullptr, f.barrier = nullptr;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  setcontext(&f.context);
}

static const size_t stack_bytes = 1 << 17;
// Runs blocks `first` to `first + count` at once, of so many threads.
static void run_blocks(int first, int count, int threads) {
  blocks.resize(count);
  while ((int)fibers.size() < count * threads) fibers.push_back(new Fiber());
  static std::vector<unsigned char> memory;
  const size_t pitch = (shared_bytes + 1023) / 1024 * 1024 + 1024;
  memory.assign(count * pitch + 1024, 0xff);
  unsigned char* at = memory.data() + (1024 - (size_t)memory.data() % 1024);
  cluster_alive = count * threads, cluster_sync_state = Sync();
  for (int b = 0; b < count; b++) {
    blocks[b] = Block();
    blocks[b].index = first + b, blocks[b].bytes = at + b * pitch, blocks[b].alive = threads;
    blocks[b].warps.resize((threads + 31) / 32);
    for (int t = 0; t < threads; t++) {
      blocks[b].warps[t / 32].alive++;
      Fiber& f = *fibers[b * threads + t];
      if (!f.stack) f.stack = (char*)malloc(stack_bytes);
      if (!f.stack) fail("no memory for a thread's stack");
      f.begun = f.done = false, f.block = &blocks[b], f.thread = t, f.sync = nullptr, f.barrier = nullptr, f.spins = 0;
      f.products.clear(), f.stores.clear(), f.product_groups.clear(), f.copies.clear(), f.copy_groups.clear();
      f.uncommitted_products = f.uncommitted_copies = 0;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = stack_bytes, f.context.uc_link = nullptr;
      makecontext(&f.context, fiber_entry, 0);
    }
  }
  const int all = count * threads;
  running = all;
  under_way.clear();
  while (running) {
    bool progress = false;
    const int begin = below(all), step = below(2) ? 1 : -1;
    for (int i = 0; i < all; i++) {
      Fiber& f = *fibers[((begin + i * step) % all + all) % all];
      if (f.done || !ready(f)) continue;
      go_on(f);
      running -= f.done;
      progress = true;
    }
    self = nullptr;
    if (!progress && under_way.empty() && running) fail("threads wait for each other");
    if (!under_way.empty() && (!progress || below(8) == 0)) {
      const size_t i = below(under_way.size());
      std::function<void()> work = under_way[i];
      under_way.erase(under_way.begin() + i);
      work();
    }
  }
  while (!under_way.empty()) {  // nobody waited for these
    under_way.back()();
    under_way.pop_back();
  }
  for (const Block& b : blocks)
    for (size_t i = shared_bytes; i < pitch; i++)
      if (b.bytes[i] != 0xff) fail("a store behind a block's shared memory");
}
const u64 (&exchange(const u64 (&words)[4], u32 lanes))[32][4] {
  Warp& w = warp_of();
  Sync& sync = lanes == ~0u ? w.sync : w.of_some[__builtin_ctz(lanes)];
  auto& shown = (lanes == ~0u ? w.exchanged : w.of_some_exchanged)[sync.generation & 1];
  memcpy(shown[self->thread % 32], words, sizeof words);
  meet(sync, lanes == ~0u ? w.alive : __builtin_popcount(lanes));
  return shown;
}
unsigned char* shared_at(u32 at, u32 bytes) {
  const Block& b = at >> 24 ? blocks[(at >> 24) - 1] : *self->block;
  at &= 0xffffff;
  if (at % (bytes < 16 ? bytes : 16)) fail("a misaligned access to shared memory");
  if (at < SHARED_BEGIN || at + bytes > SHARED_BEGIN + shared_bytes) fail("an access outside of shared memory");
  return b.bytes + (at - SHARED_BEGIN);
}

// --- launches --------------------------------------------------------------------------------------------------------

// A test runs many kernels, each with stacks of its own: together they would be more than memory.
static void free_stacks() {
  for (Fiber* f : fibers) free(f->stack), f->stack = nullptr;
}
const char* launch(void (*with)(), int count, int threads, int shared, const char* arguments, int together, int seed, int begin, int end) {
  if (_setjmp(failed)) {
    free_stacks();
    return failure;
  }
  stored.clear();
  entry = with, given = arguments, grid = count, block_size = threads, shared_bytes = shared, late = seed & 1, random_state = seed * 2654435761u + 1, self = nullptr;
  if (!end) end = count;
  for (int first = begin; first < end; first += together) run_blocks(first, min(together, end - first), threads);
  free_stacks();
  return nullptr;
}

// --- barriers and copies ---------------------------------------------------------------------------------------------

void advance(u32 at, int arrivals, int bytes) {
  u64& b = mbarrier(at);
  u32 parity = b & 1, count = b >> 1 & 0x7fff, missing = b >> 16 & 0x7fff;
  int expected = (int)(b >> 32) + bytes;
  if (!count) fail("a barrier that was not initialised");
  if ((int)missing < arrivals) fail("a barrier has more arrivals than it waits for");
  missing -= arrivals;
  if (!missing && !expected) parity ^= 1, missing = count;
  b = parity | (u64)count << 1 | (u64)missing << 16 | (u64)(u32)expected << 32;
}
// Work that ends with bytes at a barrier: now, or later.
static void start(std::function<void()> work) {
  Fiber* by = self;
  if (!late && below(2)) return work();
  under_way.push_back([=] {
    Fiber* now = self;
    self = by;
    work();
    self = now;
  });
}
void finish_copies(Fiber& f, size_t groups_left) {
  while (f.copy_groups.size() > groups_left) {
    for (size_t i = 0; i < f.copy_groups[0]; i++) f.copies[i]();
    f.copies.erase(f.copies.begin(), f.copies.begin() + f.copy_groups[0]);
    f.copy_groups.erase(f.copy_groups.begin());
  }
}
// Elements of a box: where they are in shared memory, and in the tensor (null: nowhere).
template <class Each> static u32 each_of_box(const TensorMap& m, u32 at, const int (&first)[5], Each each) {
  const u32 element = (u32)m.strides[0];
  u32 copied[5], count = 1;
  for (int i = 0; i < 5; i++) copied[i] = (m.box[i] + m.steps[i] - 1) / m.steps[i], count *= copied[i];
  if (at % 128) fail("a box at a misaligned place");
  for (int i = 1; i < 5; i++)
    if (m.dims[i] > 1 && m.strides[i] % 16) fail("a tensor map of misaligned strides");
  if (m.address % 16) fail("a tensor map of a misaligned tensor");
  if (copied[0] * element % 16) fail("a box whose rows are not whole units");
  for (u32 i = 0; i < count; i++) {
    u32 rest = i;
    bool there = true;
    u64 from = m.address;
    for (int k = 0; k < 5; k++) {
      const long long c = first[k] + (long long)(rest % copied[k]) * m.steps[k];
      rest /= copied[k];
      there &= c >= 0 && c < m.dims[k];
      from += c * m.strides[k];
    }
    each(shared_at(swizzled(at + i * element, m.span), element), there ? (unsigned char*)from : nullptr, element);
  }
  return count * element;
}
void store_global(void* to, const void* from, size_t bytes, bool ok) {
  if (!ok) return;
  if ((size_t)to % bytes) fail("a misaligned store");
  for (size_t i = 0; i < bytes; i += 2)
    if (!stored.insert((size_t)to + i).second) fail("an element is stored twice");
  memcpy(to, from, bytes);
}
static void store_later(std::function<void()> work) {
  if (late) self->stores.push_back(work);
  else work();
}
void store_words(void* to, u32 from, int bytes) {
  store_later([=] { memcpy(to, shared_at(from, 16), bytes); });
}

// --- matrix instructions ------------------------------------------------------------------------------------------------

void later(const Product& product, void (*multiply)(const Product&)) {
  if (!late) return multiply(product);
  self->products.push_back([=] { multiply(product); }), self->uncommitted_products++;
}
void finish_products(size_t groups_left) {
  Fiber& f = *self;
  while (f.product_groups.size() > groups_left) {
    for (size_t i = 0; i < f.product_groups[0]; i++) f.products[i]();
    f.products.erase(f.products.begin(), f.products.begin() + f.product_groups[0]);
    f.product_groups.erase(f.product_groups.begin());
  }
}
}  // namespace machine

void barrier_wait(u32 barrier, u32 parity) {
  const u64& b = machine::mbarrier(barrier);
  if (!(b >> 1 & 0x7fff)) machine::fail("a barrier that was not initialised");
  if ((b & 1) != parity) return;
  machine::self->barrier = &b, machine::self->parity = parity;
  machine::yield();
}
void copy16(u32 to, const void* from, int bytes) {
  using namespace machine;
  unsigned char* at = shared_at(to, 16);
  if ((size_t)from % 16 && bytes) fail("a copy from a misaligned place");
  auto work = [=] {
    if (bytes) memcpy(at, from, bytes);
    memset(at + bytes, 0, 16 - bytes);
  };
  if (!late) return work();
  self->copies.push_back(work), self->uncommitted_copies++;
}
void arrive_when_copied(u32 barrier) {
  using namespace machine;
  std::vector<std::function<void()>> copies;
  copies.swap(self->copies);
  self->copy_groups.clear(), self->uncommitted_copies = 0;
  start([=] {
    for (auto& copy : copies) copy();
    advance(barrier, 1, 0);
  });
}
void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  using namespace machine;
  if (bytes % 16 || (size_t)from % 16 || to % 16 || !bytes) fail("a bulk copy that is not of whole units");
  shared_at(to + bytes - 16, 16);
  start([=] {
    memcpy(shared_at(to, 16), from, bytes);
    advance(barrier, 0, -(int)bytes);
  });
}
void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  using namespace machine;
  const TensorMap* m = &map;
  start([=] {
    const int first[5] = {a, b, c, d, e};
    const u32 bytes = each_of_box(*m, to, first, [&](unsigned char* at, const unsigned char* from, u32 size) {
      if (from) memcpy(at, from, size);
      else memset(at, 0, size);
      float v;
      if (m->rounded) {
        memcpy(&v, at, 4);
        const u32 word = to_tf32(v);
        memcpy(at, &word, 4);
      }
    });
    advance(barrier, 0, -(int)bytes);
  });
}
void store_box(const TensorMap& map, u32 from, int a, int b, int c, int d, int e) {
  using namespace machine;
  const TensorMap* m = &map;
  store_later([=] {
    const int first[5] = {a, b, c, d, e};
    each_of_box(*m, from, first, [](const unsigned char* at, unsigned char* to, u32 size) {
      if (to) memcpy(to, at, size);
    });
  });
}
void bulk_wait() {
  for (auto& store : machine::self->stores) store();
  machine::self->stores.clear();
}
u32 load_acquire(const u32* from) {
  if (machine::self->spins++ > 1000000) machine::fail("a thread waits for a word that nobody writes");
  machine::yield();
  return *from;
}
void wgmma_commit() {
  machine::self->product_groups.push_back(machine::self->uncommitted_products);
  machine::self->uncommitted_products = 0;
}
