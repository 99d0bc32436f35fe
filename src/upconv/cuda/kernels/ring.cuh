// The ring of stages that one thread fills by the tensor copy engine (of `joined` warps, from another ring) and consumers empty.
#include "ptx.cuh"

template <int STAGES>
struct CursorOf {                                         // a place in the ring, and the parity of its phase
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

// What no matrix instruction reads any more, by its barrier; 0: nothing.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0 && barrier) barrier_arrive(barrier);
}
