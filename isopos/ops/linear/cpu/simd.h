/* Vectors of one instruction set: their length, exp, sums, and numbers of 16 bits. */

#ifdef __AVX512F__
#define LANES 16
#define ROWS 8 /* of a block, whose ROWS * WIDE sums stay in registers: enough of them to hide that a sum takes four cycles */
#define WIDE 2 /* vectors of a row of a block */
#define LANES_LIST(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#else
#define LANES 8
#define ROWS 4
#define WIDE 2
#define LANES_LIST(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int order __attribute__((vector_size(LANES * 4)));
typedef double doubles __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE lanes choose(order where, lanes a, lanes b)
{
    return (lanes)((where & (order)a) | (~where & (order)b));
}

/* The smaller and the larger one; NaN where x is. */
INLINE lanes at_most(lanes x, float most)
{
#if LANES == 16
    return (lanes)_mm512_min_ps(_mm512_set1_ps(most), (__m512)x);
#else
    return (lanes)_mm256_min_ps(_mm256_set1_ps(most), (__m256)x);
#endif
}

INLINE lanes at_least(lanes x, float least)
{
#if LANES == 16
    return (lanes)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
#else
    return (lanes)_mm256_max_ps(_mm256_set1_ps(least), (__m256)x);
#endif
}

/* exp of the smaller one of x and `most`, to about one unit in the last place; with infinities and NaN as they should be. */
INLINE lanes exponential(lanes x, float most)
{
    const float log2 = 1.44269504f, high = 0.693359375f, low = -2.12194440e-4f; /* high + low = log 2 */
    x = at_least(at_most(x, most), -104);
#if LANES == 16
    /* x = log(2) n + r, where n has four binary places: 2^n is a number of a table times a power of 2 */
    static const float powers[16] ALIGNED = {1.0f, 1.0442737824f, 1.0905077327f, 1.1387886348f, 1.1892071150f, 1.2418578121f,
                                             1.2968395547f, 1.3542555469f, 1.4142135624f, 1.4768261459f, 1.5422108254f,
                                             1.6104903319f, 1.6817928305f, 1.7562521604f, 1.8340080864f, 1.9152065614f};
    const lanes shift = (lanes){0} + 0x1.8p19f, shifted = x * log2 + shift, n = shifted - shift;
    const lanes r = (x - n * high) - n * low, s = r * 1.6666667163e-1f + 0.5f, y = (s * r) * r + r;
    const lanes power = __builtin_shuffle(*(const lanes *)powers, (order)shifted & 15);
    return (lanes)_mm512_scalef_ps((__m512)(power * y + power), (__m512)n);
#else
    const lanes power = (lanes)_mm256_round_ps((__m256)(x * log2), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const lanes r = (x - power * high) - power * low;
    lanes y = (lanes){0} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const order whole = (order)_mm256_cvtps_epi32((__m256)power), half = whole >> 1;
    return y * (lanes)((half + 127) << 23) * (lanes)((whole - half + 127) << 23);
#endif
}

/* With what float32 leaves of x, by which products of exponentials are as exact as they are. */
INLINE lanes exponentials(doubles x)
{
    const lanes most = __builtin_convertvector(x, lanes), power = exponential(most, 89);
    const lanes rest = __builtin_convertvector(x - __builtin_convertvector(most, doubles), lanes);
    return power + power * choose(rest * rest < 1, rest, (lanes){0}); /* infinity has none */
}

/* Writes a vector, with `uncached` to memory without reading what is overwritten: an aligned one then. */
INLINE void put(float *out, lanes x, int uncached)
{
    if (!uncached)
        *(lanes *)out = x;
    else
#if LANES == 16
        _mm512_stream_ps(out, (__m512)x);
#else
        _mm256_stream_ps(out, (__m256)x);
#endif
}

INLINE float total(lanes x)
{
#define HALF8(l) ((l) ^ 8)
#define HALF4(l) ((l) ^ 4)
#define HALF2(l) ((l) ^ 2)
#define HALF1(l) ((l) ^ 1)
#if LANES == 16
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF8));
#endif
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF4));
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF2));
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF1));
    return x[0];
}

INLINE float dot(const float *x, const float *y, long width)
{
    lanes sum = {0};
    for (long m = 0; m < width; m += LANES)
        sum += *(const lanes *)(x + m) * *(const lanes *)(y + m);
    return total(sum);
}

INLINE lanes widen(const void *from, long type)
{
#if LANES == 16
    const __m256i x = _mm256_loadu_si256(from);
    return type == FLOAT16 ? (lanes)_mm512_cvtph_ps(x) : (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
#else
    const __m128i x = _mm_loadu_si128(from);
    return type == FLOAT16 ? (lanes)_mm256_cvtph_ps(x) : (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
#endif
}

/* To the nearest of a type, and to the even one of two. */
INLINE void narrow(lanes x, long type, void *to)
{
    const order bits = (order)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const order half = ((x == x) & rounded) | ((x != x) & 0x7fc0);
#if LANES == 16
    _mm256_storeu_si256(to, type == FLOAT16 ? _mm512_cvtps_ph((__m512)x, 0) : _mm512_cvtepi32_epi16((__m512i)half));
#else
    const __m256i low = _mm256_and_si256((__m256i)half, _mm256_set1_epi32(0xffff));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(to, type == FLOAT16 ? _mm256_cvtps_ph((__m256)x, 0) : packed);
#endif
}
