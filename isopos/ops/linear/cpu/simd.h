/* Vectors as extensions of GCC and Clang: their length, exp, sums, and 16-bit numbers.

   The length depends on the instruction set. Intrinsics stand only where no operator has the same meaning, or compilers turn it
   into more than one instruction; sets without intrinsics here, such as NEON, use operators. */

#if defined __AVX512F__
#define LANES 16
#define ROWS 8 /* rows of a block; its ROWS * WIDE sums stay in registers, enough to hide the latency of four cycles */
#define WIDE 2 /* vectors per row of a block */
#define LIST(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#define X86(name) _mm512_##name
typedef __m512 native;
#elif defined __AVX2__
#define LANES 8
#define ROWS 4
#define WIDE 2
#define LIST(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#define X86(name) _mm256_##name
typedef __m256 native;
#else
#define LANES 4
#define ROWS 4
#define LIST(f) f(0), f(1), f(2), f(3)
#ifdef __SSE2__
#define WIDE 2
#define X86(name) _mm_##name
typedef __m128 native;
#else
#define WIDE 4 /* NEON has 32 registers */
#endif
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t order __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef double doubles __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* The numbers f(0), f(1), ... of two concatenated vectors. GCC 12 and later know Clang's name, too. */
#if defined __clang__
#define SHUFFLE(a, b, f) __builtin_shufflevector(a, b, LIST(f))
#else
#define SHUFFLE(a, b, f) __builtin_shuffle(a, b, (order){LIST(f)})
#endif
#define HALF8(l) ((l) ^ 8)
#define HALF4(l) ((l) ^ 4)
#define HALF2(l) ((l) ^ 2)
#define HALF1(l) ((l) ^ 1)

INLINE order either(order where, order a, order b)
{
    return (where & a) | (~where & b);
}

INLINE lanes choose(order where, lanes a, lanes b)
{
    return (lanes)either(where, (order)a, (order)b);
}

/* Minimum and maximum; NaN if x is NaN. */
INLINE lanes at_most(lanes x, float most)
{
#ifdef X86
    return (lanes)X86(min_ps)(X86(set1_ps)(most), (native)x);
#else
    return choose((order)(x > most), (lanes){0} + most, x);
#endif
}

INLINE lanes at_least(lanes x, float least)
{
#ifdef X86
    return (lanes)X86(max_ps)(X86(set1_ps)(least), (native)x);
#else
    return choose((order)(x < least), (lanes){0} + least, x);
#endif
}

#if LANES < 16
/* The nearest integers of small numbers. */
INLINE lanes nearest(lanes x)
{
#ifdef __AVX2__
    return (lanes)_mm256_round_ps((native)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const lanes shift = (lanes){0} + 0x1.8p23f;
    return x + shift - shift;
#endif
}
#endif

/* exp(min(x, most)), to about one unit in the last place, with the right infinities and NaN. */
INLINE lanes exponential(lanes x, float most)
{
    const float log2 = 1.44269504f, high = 0.693359375f, low = -2.12194440e-4f; /* high + low = log 2 */
    x = at_least(at_most(x, most), -104);
#if LANES == 16
    /* x = log(2) n + r, where n has four binary digits after the point: 2^n is a table entry times a power of 2 */
    static const float powers[16] ALIGNED = {1.0f, 1.0442737824f, 1.0905077327f, 1.1387886348f, 1.1892071150f, 1.2418578121f,
                                             1.2968395547f, 1.3542555469f, 1.4142135624f, 1.4768261459f, 1.5422108254f,
                                             1.6104903319f, 1.6817928305f, 1.7562521604f, 1.8340080864f, 1.9152065614f};
    const lanes shift = (lanes){0} + 0x1.8p19f, shifted = x * log2 + shift, n = shifted - shift;
    const lanes r = (x - n * high) - n * low, s = r * 1.6666667163e-1f + 0.5f, y = (s * r) * r + r;
    const lanes power = (lanes)_mm512_permutexvar_ps((__m512i)shifted, *(const native *)powers);
    return (lanes)_mm512_scalef_ps((native)(power * y + power), (native)n);
#else
    const lanes power = nearest(x * log2);
    const lanes r = (x - power * high) - power * low;
    lanes y = (lanes){0} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const order whole = __builtin_convertvector(power, order), half = whole >> 1;
    return y * (lanes)((half + 127) << 23) * (lanes)((whole - half + 127) << 23);
#endif
}

/* exp of float64 exponents: the part of x that float32 drops is added back, so that products of weights stay exact. */
INLINE lanes exponentials(doubles x)
{
    const lanes most = __builtin_convertvector(x, lanes), power = exponential(most, 89);
    const lanes rest = __builtin_convertvector(x - __builtin_convertvector(most, doubles), lanes);
    return power + power * choose((order)(rest * rest < 1.0f), rest, (lanes){0}); /* no rest at infinity */
}

/* Writes a vector; with `uncached`, to memory past the caches, at an aligned address. Other threads may read it after `fence`. */
INLINE void put(float *out, lanes x, int uncached)
{
#ifdef X86
    if (uncached) {
        X86(stream_ps)(out, (native)x);
        return;
    }
#endif
    (void)uncached;
    *(lanes *)out = x;
}

INLINE void fence(void)
{
#ifdef X86
    _mm_sfence();
#endif
}

/* The numbers of two concatenated vectors at indices; higher bits of an index are ignored. */
#ifdef __AVX2__
#define LOOKS_UP
INLINE lanes look_up(lanes a, lanes b, order at)
{
#if LANES == 16
    return (lanes)_mm512_permutex2var_ps((native)a, (__m512i)at, (native)b);
#else
    const native low = _mm256_permutevar8x32_ps((native)a, (__m256i)at), high = _mm256_permutevar8x32_ps((native)b, (__m256i)at);
    return (lanes)_mm256_blendv_ps(low, high, (native)(at << 28));
#endif
}
#endif

INLINE float total(lanes x)
{
#if LANES == 16
    x += SHUFFLE(x, x, HALF8);
#endif
#if LANES >= 8
    x += SHUFFLE(x, x, HALF4);
#endif
    x += SHUFFLE(x, x, HALF2);
    x += SHUFFLE(x, x, HALF1);
    return x[0];
}

INLINE float dot(const float *x, const float *y, int64_t width)
{
    lanes sum = {0};
    for (int64_t m = 0; m < width; m += LANES)
        sum += *(const lanes *)(x + m) * *(const lanes *)(y + m);
    return total(sum);
}

/* Conversion of float16 to float32, and of float32 to the nearest float16, ties to even. */
INLINE lanes from_float16(halves x)
{
#if defined __AVX512F__
    return (lanes)_mm512_cvtph_ps((__m256i)x);
#elif defined __F16C__
    return (lanes)_mm256_cvtph_ps((__m128i)x);
#else
    const order bits = __builtin_convertvector(x, order), size = bits & 0x7fff, sign = (bits & 0x8000) << 16;
    const lanes least = __builtin_convertvector(size, lanes) * 0x1p-24f; /* subnormal numbers */
    const order special = (order)(size >= 0x7c00) & 0x7f800000;
    const order normal = ((size << 13) + (112 << 23)) | special;
    return (lanes)(sign | either((order)(size < 0x400), (order)least, normal));
#endif
}

INLINE halves to_float16(lanes x)
{
#if defined __AVX512F__
    return (halves)_mm512_cvtps_ph((native)x, 0);
#elif defined __F16C__
    return (halves)_mm256_cvtps_ph((native)x, 0);
#else
    const order bits = (order)x, size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    const order least = (order)((lanes)size + 0.5f) - 0x3f000000; /* subnormal numbers, in units of 0.5 */
    const order normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const order finite = either((order)(size < 0x38800000), least, normal);
    const order special = ((order)(size > 0x7f800000) & 0x200) | 0x7c00; /* NaN or infinity */
    return __builtin_convertvector(sign | either((order)(size < 0x477ff000), finite, special), halves);
#endif
}

INLINE lanes widen(const void *from, int64_t type)
{
    const halves x = *(const halves *)from;
    return type == FLOAT16 ? from_float16(x) : (lanes)(__builtin_convertvector(x, order) << 16);
}

/* Conversion to the nearest number of a type, ties to even. */
INLINE void narrow(lanes x, int64_t type, void *to)
{
    const order bits = (order)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const order half = ((order)(x == x) & rounded) | ((order)(x != x) & 0x7fc0);
    *(halves *)to = type == FLOAT16 ? to_float16(x) : __builtin_convertvector(half, halves);
}
