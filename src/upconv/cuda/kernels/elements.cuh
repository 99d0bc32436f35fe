// Elements that kernels copy as they are, by their bytes.
#include "ptx.cuh"

template <int BYTES> struct ElementBits { using Type = u32; };
template <> struct ElementBits<2> { using Type = u16; };
template <int BYTES> using ElementOf = typename ElementBits<BYTES>::Type;
