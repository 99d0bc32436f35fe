// How a kernel's numbers are stored, of PRECISION 0 to 3 (TF32, IEEE, float16, bfloat16): ELEMENT_TYPE and, as an integer, ELEMENT_BITS; a float32 as it is stored;
// and what is stored as a float32.
#if PRECISION < 2
#define ELEMENT_TYPE float
#define ELEMENT_BITS u32
#define STORE_BITS(v) __float_as_uint(v)
#define VALUE(v) (v)
#else
#define ELEMENT_TYPE u16
#define ELEMENT_BITS u16
#define STORE_BITS(v) (PRECISION == 2 ? half_bits(v) : bfloat_bits(v))
#define VALUE(v) (PRECISION == 2 ? half_value(v) : bfloat_value(v))
#define PAIR_BITS(low, high) (PRECISION == 2 ? half_pair(low, high) : bfloat_pair(low, high))  // two, side by side
#endif
