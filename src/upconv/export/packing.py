"""An exported file's kernel that packs weights for `gather`: a thread a word, where the library's moves whole tiles."""

from __future__ import annotations

ENTRY = "pack_weights"
THREADS = 256
TEXT = """\
// --- packed weights -------------------------------------------------------------------------------------------------

template <class C> __constant__ const auto PACKED_TAPS = table_of<short>(C::tap_indices);

// Brings weights, (input channels, output channels, taps) or for the gradient for the input (output channels, input
// channels, taps), into the order in which the consumers read them: words of fragments
//   [group][block of output channels][variant][chunk][tap][step of K][part][warpgroup][warp][lane][4],
// where a word has a row of M and a channel of K (of 16 bits two), or zeros. The second part of IEEE float32 is what
// TF32 leaves of the first.
template <class C>
__global__ void pack_weights(const typename PixelTile<C>::Number::Type* __restrict__ weight,
                             u32* __restrict__ packed, int words) {
  using G = GatherWork<C>;
  constexpr int VARIANTS = C::variants, K = 32 / G::ELEMENT;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= words) return;
  int rest = index;
  const auto next = [&rest](int count) {
    const int found = rest % count;
    rest /= count;
    return found;
  };
  const int word = next(4), lane = next(32), warp = next(4);
  const int wg = next(G::WGS_M), part = next(G::PARTS), k_step = next(G::K_STEPS);
  int place = next(G::end_entry(VARIANTS - 1) * G::CHUNKS), variant = 0;  // among all variants' chunks and taps
  while (place >= G::end_entry(variant) * G::CHUNKS) variant++;
  place -= G::first_entry(variant) * G::CHUNKS;
  const int chunk = place / G::entries_of(variant), entry = G::first_entry(variant) + place % G::entries_of(variant);
  const int tap = PACKED_TAPS<C>[entry * C::subs + warp * 16 / C::rows_per_sub];
  const int group = rest / C::cout_blocks, block = rest % C::cout_blocks * G::WGS_M + wg;
  const int cout = block * C::rows_per_sub + warp * 16 % C::rows_per_sub + lane / 4 + word % 2 * 8;
  const int cin = chunk * C::ck + k_step * K + lane % 4 * (4 / G::ELEMENT) + word / 2 * (16 / G::ELEMENT);
  const auto value = [&](int c) {  // of channel c of K
@SHUFFLED@    const long long channels = C::grad_input ? (long long)(group * C::cout_g + cout) * C::cin_g + c
                                             : (long long)(group * C::cin_g + c) * C::cout_g + cout;
    return tap >= 0 && cout < C::cout_g && c < C::cin_g ? weight[channels * C::taps + tap] : 0;
  };
@WORD@}
"""
_SHUFFLED = """\
    if constexpr (C::store == STORE_PHASES) {  // rows of M are channels and phases
      const int at = tap >= 0 && c < C::cin_g ? Shuffle<C>::weight_at(cout, tap, 1) : -1;
      return at >= 0 ? weight[(long long)c * C::cout * Shuffle<C>::LAYER_TAPS + at] : 0;
    }
"""
_WORDS = {
    "tf32": "  packed[index] = to_tf32(value(cin));\n",
    "ieee": """\
  const float whole = value(cin);
  packed[index] = part == 0 ? to_tf32(whole) : low_part(whole, to_tf32(whole));
""",
    "fp16": "  packed[index] = value(cin) | (u32)value(cin + 1) << 16;\n",
}


def text(precision: str, shuffled: bool) -> str:
    """The kernel for a precision. ``shuffled``: of some pass, rows of M are channels and phases."""
    word = _WORDS["fp16" if precision == "bf16" else precision]
    return TEXT.replace("@SHUFFLED@", _SHUFFLED if shuffled else "").replace("@WORD@", word)
