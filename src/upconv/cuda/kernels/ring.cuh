// A ring of stages in shared memory, which some threads (or copy engines) fill and consumers empty.
#include "ptx.cuh"

template <int STAGES>
struct CursorOf {                                       // a place in the ring, and the parity of its phase
  u32 stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void move(u32 by) {
    u32 at = stage + by;
    stage = at % STAGES;
    parity ^= at / STAGES & 1;
  }
};

template <int STAGES, int STAGE_BYTES>
struct RingOf {
  using Cursor = CursorOf<STAGES>;
  static constexpr int BYTES = STAGES * STAGE_BYTES, BARRIER_BYTES = STAGES * 16;
  u32 stages, full_at, empty_at;                        // its stages, and a barrier of each for who fills it, and for who has read it

  static __device__ __forceinline__ RingOf at(u32 stages, u32 barriers) { return {stages, barriers, barriers + 8 * STAGES}; }

  // One thread; of so many arrivals each.
  __device__ __forceinline__ void init(int full, int empty) const {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_at + 8 * i, full);
      barrier_init(empty_at + 8 * i, empty);
    }
  }
  __device__ __forceinline__ u32 stage(const Cursor& c) const { return stages + c.stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 full(const Cursor& c) const { return full_at + c.stage * 8; }
  __device__ __forceinline__ u32 empty(const Cursor& c) const { return empty_at + c.stage * 8; }
  __device__ __forceinline__ void wait_full(const Cursor& c) const { barrier_wait(full(c), c.parity); }
  __device__ __forceinline__ void wait_empty(const Cursor& c) const { barrier_wait(empty(c), c.parity); }
};

// What no matrix instruction of the warp reads any more, by its barrier; 0: nothing. All its lanes have come there.
__device__ __forceinline__ void leave(u32 barrier, int lane) {
  if (lane == 0 && barrier) barrier_arrive(barrier);
}
// The same of lanes that may be apart.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  leave(barrier, lane);
}

// A block: one thread makes its barriers by `init`; of its warpgroups the first produce, and leave registers to the others, which consume;
// of each thread so many. `consume` is told which of the consumers, and of its threads, it is. It may read what `pack` wrote, and store
// where `pack` may have read.
template <int PRODUCERS, int CONSUMERS, int PRODUCER_REGISTERS, int CONSUMER_REGISTERS, class Init, class Produce, class Consume>
__device__ __forceinline__ void run_block(const Init& init, const Produce& produce, const Consume& consume) {
  constexpr int WARPGROUPS = PRODUCERS + CONSUMERS, BEGINS_WITH = 65536 / (WARPGROUPS * 128) / 8 * 8;
  static_assert(PRODUCERS * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= WARPGROUPS * BEGINS_WITH, "who asks for more registers waits for ever");
  static_assert(PRODUCER_REGISTERS % 8 == 0 && CONSUMER_REGISTERS % 8 == 0, "registers come by eights");
  if (threadIdx.x == 0) {
    init();
    barriers_begun();
  }
  __syncthreads();
  int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (PRODUCERS == 1 ? warpgroup == 0 : warpgroup < PRODUCERS) {  // (a test for 0 takes an instruction less)
    if constexpr (PRODUCER_REGISTERS > 0) fewer_registers<PRODUCER_REGISTERS>();
    produce();
  } else {
    wait_for_results();
    if constexpr (PRODUCER_REGISTERS > 0) more_registers<CONSUMER_REGISTERS>();
    consume(warpgroup - PRODUCERS, thread);
  }
}
