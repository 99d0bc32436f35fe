// Packing: weight (CIN, COUT_G, taps), of a gradient for the input (COUT, CIN_G, taps), to fragments
// [group][cout block][chunk][entry of all variants][k step][part][wgs][warp][lane]: 16 bytes a lane.
#include "packing.cuh"
#include "gather_weights.cuh"
#include "shuffle.cuh"

// [entry][subs]: the kernel's tap, -1 for none. A warp's lanes read it at different places, which constant memory serves in turn.
template <class C> __device__ const auto PACKED_TAP = table_of<short>(C::tap_indices);

template <class C_>
struct GatherPack : PacksUnits<GatherPack<C_>> {
using C = C_;
using G = GatherWork<C>;
using Number = typename G::Number;
static constexpr int VEC = G::VEC, K = 32 / G::ELEMENT;  // channels of a unit, and of a step
static constexpr bool SHUFFLED = C::store == STORE_PHASES;
static constexpr int SECOND = SHUFFLED ? C::cout : C::grad_input ? C::cin_g : C::cout_g;
static constexpr int TAPS_IN_ALL = C::taps;
static constexpr int PACK_UNITS = C::m_groups / C::variants * G::CHUNKS * G::ENTRIES * G::STEPS_PER_TAP * G::WGS_M * 128;

// Neighbouring threads read neighbouring weights: taps, or (channels-last) channels.
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int rest = i;
  const auto next = [&rest](int count) {
    const int found = rest % count;
    rest /= count;
    return found;
  };
  int entry = write.tap_step == 1 ? next(G::ENTRIES) : 0;
  const int first = next(C::grad_input ? 4 : 8), second = next(C::grad_input ? 8 : 4), g = C::grad_input ? second : first, q = C::grad_input ? first : second;
  if (write.tap_step != 1) entry = next(G::ENTRIES);
  const int part = next(G::PARTS), k_step = next(G::K_STEPS), warp = next(4), wg = next(G::WGS_M), chunk = next(G::CHUNKS), block = rest;
  const int cout = (block % C::cout_blocks * G::WGS_M + wg) * C::rows_per_sub + warp * 16 % C::rows_per_sub + g, cin = chunk * C::ck + k_step * K + q * (VEC / 4);
  const int group = block / C::cout_blocks, tap = PACKED_TAP<C>[entry * C::subs + warp * 16 / C::rows_per_sub];
  const long long fragment = (((((long long)block * G::CHUNKS + chunk) * G::ENTRIES + entry) * G::K_STEPS + k_step) * G::PARTS + part) * G::WGS_M + wg;
  write(((fragment * 4 + warp) * 32 + g * 4 + q) * 16, [=](int e) -> WeightAt {
    const int word = e / (VEC / 4), m = cout + word % 2 * 8, k = cin + word / 2 * VEC + e % (VEC / 4);
    WeightAt found = {tap >= 0 && k < C::cin_g && m < C::cout_g, 0, 0, tap, part == 1};
    if constexpr (SHUFFLED) {
      Shuffle<C>::find_weight(found, m, k);
    } else {
      found.first = C::grad_input ? group * C::cout_g + m : group * C::cin_g + k;
      found.second = C::grad_input ? k : m;
    }
    return found;
  });
}
};
