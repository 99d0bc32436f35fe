// Tables of a kernel's constants that are indexed at run time: arrays of its struct of constants cannot be. A kernel has them as variable
// templates in constant memory, `template <class C> __constant__ const auto ROWS = table_of<int>(C::rows);`, or as local constants.
template <class T, int N>
struct Table {
  T at[N];
  __host__ __device__ constexpr const T& operator[](int i) const { return at[i]; }
};

template <class T, int N>
__host__ __device__ constexpr Table<T, N> table_of(const int (&of)[N]) {
  Table<T, N> found = {};
  for (int i = 0; i < N; i++) found.at[i] = of[i];
  return found;
}
