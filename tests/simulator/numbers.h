// Numbers of 16 and 8 bits, and what instructions only approximate.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

// A result some units in its last place off, as many as its bits say: what a function gives that is only approximated.
static float nearly(float x, int most) {
    if (x == 0 || !std::isfinite(x)) return x;
    u32 bits = std::bit_cast<u32>(x);
    float other = std::bit_cast<float>(bits + (bits * 0x9E3779B1u >> 16) % (2 * most + 1) - most);
    return std::isfinite(other) ? other : x;
}

static bool is_power_of_two(float x) { return x != 0 && (std::bit_cast<u32>(x) & 0x7fffff) == 0; }

static float divided(float a, float b) { return is_power_of_two(b) ? a / b : nearly(a / b, 2); }

static float reciprocal(float x) { return is_power_of_two(x) ? 1 / x : nearly(1 / x, 1); }

static float exponential(float x) { return x == std::floor(x) ? std::exp2(x) : nearly(std::exp2(x), 1); }

// Up to 2^-11 of itself off, as the bits of x say.
static float hyperbolic_tangent(float x) {
    if (std::isnan(x)) return x;
    float error = float(std::bit_cast<u32>(x) * 0x9E3779B1u >> 20) * 0x1p-22f - 0x1p-11f;
    return std::fmax(-1.0f, std::fmin(1.0f, std::tanh(x) * (1 + error)));
}

static float bf16_to_float(u16 x) { return std::bit_cast<float>(u32(x) << 16); }

static u16 float_to_bf16(float x) {
    u32 bits = std::bit_cast<u32>(x);
    if (std::isnan(x)) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A float rounded to nearest even with so many bits of exponent and mantissa; `infinite`: whether its largest exponent
// is infinity's, as IEEE 754 has it, or a number's, as e4m3's.
static u32 round_to(float x, int exponent, int mantissa, bool infinite, bool saturate) {
    u32 sign = std::signbit(x) ? 1u << (exponent + mantissa) : 0;
    int bias = (1 << (exponent - 1)) - 1;
    u32 not_a_number = infinite ? (((1u << exponent) - 1) << mantissa | ((1u << mantissa) - 1)) : (1u << (exponent + mantissa)) - 1;
    u32 beyond = infinite ? ((1u << exponent) - 1) << mantissa : not_a_number;
    u32 largest = beyond - 1;
    if (std::isnan(x)) return not_a_number;  // of a positive sign, as cvt makes it
    double a = std::fabs(double(x));
    if (std::isinf(x)) return sign | (saturate ? largest : beyond);
    if (a == 0) return sign;
    int e = std::max(std::ilogb(a), 1 - bias);
    u64 units = u64(std::nearbyint(std::ldexp(a, mantissa - e)));
    u64 bits = units + (u64(e + bias - 1) << mantissa);
    if (bits >= beyond) return sign | (saturate ? largest : beyond);
    return sign | u32(bits);
}

static float from_bits(u32 x, int exponent, int mantissa, bool infinite) {
    int bias = (1 << (exponent - 1)) - 1;
    u32 e = x >> mantissa & ((1u << exponent) - 1), m = x & ((1u << mantissa) - 1);
    bool negative = x >> (exponent + mantissa) & 1;
    float value;
    if (infinite && e == (1u << exponent) - 1)
        value = m ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    else if (!infinite && e == (1u << exponent) - 1 && m == (1u << mantissa) - 1)
        value = std::numeric_limits<float>::quiet_NaN();
    else if (e == 0)
        value = std::ldexp(float(m), 1 - bias - mantissa);
    else
        value = std::ldexp(float(m | 1u << mantissa), int(e) - bias - mantissa);
    return negative ? -value : value;
}

static u16 float_to_half(float x) { return std::isnan(x) ? 0x7fff : std::bit_cast<u16>(_Float16(x)); }
static u8 float_to_e4m3(float x) { return u8(round_to(x, 4, 3, false, true)); }
static u8 float_to_e5m2(float x) { return u8(round_to(x, 5, 2, true, true)); }

template <int BITS>
static std::vector<float> table(int exponent, int mantissa, bool infinite) {
    std::vector<float> values(1 << BITS);
    for (u32 i = 0; i < values.size(); i++) values[i] = from_bits(i, exponent, mantissa, infinite);
    return values;
}
static const std::vector<float> HALF = table<16>(5, 10, true), E4M3 = table<8>(4, 3, false), E5M2 = table<8>(5, 2, true);

static const std::array<std::vector<u8>, 2> FROM_HALF = [] {  // e4m3, e5m2
    std::array<std::vector<u8>, 2> bytes;
    for (float x : HALF) bytes[0].push_back(float_to_e4m3(x)), bytes[1].push_back(float_to_e5m2(x));
    return bytes;
}();

static float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }
