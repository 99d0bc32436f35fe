// Tables of a kernel's constants: arrays of its struct, which device code does not index itself at run time. A kernel may have one as a
// variable template in constant memory, `template <class C> __constant__ const auto ROWS = table_of<int>(C::rows);`, or look it up as below.
template <class T, int N>
struct Table {
  T at[N];
  __device__ constexpr const T& operator[](int i) const { return at[i]; }
};

template <class T, int N>
__device__ constexpr Table<T, N> table_of(const int (&of)[N]) {
  Table<T, N> found = {};
  for (int i = 0; i < N; i++) found.at[i] = of[i];
  return found;
}

// An array's element: of an index that the compiler knows once loops are unrolled.
template <const auto& VALUES>
__device__ __forceinline__ constexpr int value_at(int i) {
  constexpr auto found = table_of<int>(VALUES);
  return found[i];
}

// The same of any index, from constant memory.
template <const auto& VALUES>
__device__ __forceinline__ int constant_at(int i) {
  static __constant__ const auto found = table_of<int>(VALUES);
  return found[i];
}
