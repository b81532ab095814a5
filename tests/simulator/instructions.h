// All instructions by name.
#pragma once

#include <string>
#include <unordered_map>

#include "barriers.h"
#include "copies.h"
#include "lanes.h"
#include "memory.h"
#include "products.h"

static void nothing(Warp&, const s64*, int, u32) {}
static void trap(Warp&, const s64*, int, u32) { fail("trap"); }

template <auto F, class T>
static std::array<Run, 3> comparisons() {
    return {compare<F, T, Join::NONE>, compare<F, T, Join::AND>, compare<F, T, Join::OR>};
}

static u32 pick(u32 a, u32 b, u32 selector) {
    u64 bytes = a | u64(b) << 32;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 digit = selector >> 4 * i & 15, byte = u32(bytes >> 8 * (digit & 7)) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
static u32 any_bits(u32 a, u32 b, u32 c, u32 truth) {
    u32 result = 0;
    for (u32 i = 0; i < 8; i++)
        if (truth >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}
static float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
static float smaller(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }
static s32 truncated(float x) {
    if (std::isnan(x)) return 0;
    return x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? s32(-2147483648ll) : s32(x);
}
template <class T>
static T shifted(T x, u32 n) {  // to the right
    constexpr u32 BITS = 8 * sizeof(T);
    return n >= BITS ? T(x < 0 ? -1 : 0) : T(x >> n);
}
template <class T>
static T field(T x, u32 from, u32 bits) {
    from &= 255, bits &= 255;
    if (!bits) return 0;
    s64 value = std::is_signed_v<T> ? s64(x) : s64(u64(x));
    value = from > 63 ? (value < 0 ? -1 : 0) : value >> from;
    if (bits > 31) return T(value);
    value &= (s64(1) << bits) - 1;
    if (std::is_signed_v<T> && value >> (bits - 1) & 1) value -= s64(1) << bits;
    return T(value);
}

static std::unordered_map<std::string, Run> all_instructions() {
    std::unordered_map<std::string, Run> t;
#define INTEGERS(BITS, U, S)                                                                        \
    t["mov.b" #BITS] = t["mov.u" #BITS] = t["mov.s" #BITS] = each<[](U a) { return a; }, U, U>;     \
    t["add.s" #BITS] = t["add.u" #BITS] = each<[](U a, U b) { return U(a + b); }, U, U, U>;         \
    t["sub.s" #BITS] = t["sub.u" #BITS] = each<[](U a, U b) { return U(a - b); }, U, U, U>;         \
    t["mul.lo.s" #BITS] = t["mul.lo.u" #BITS] = each<[](U a, U b) { return U(u64(a) * b); }, U, U, U>;   \
    t["mad.lo.s" #BITS] = t["mad.lo.u" #BITS] = each<[](U a, U b, U c) { return U(u64(a) * b + c); }, U, U, U, U>; \
    t["div.s" #BITS] = each<[](S a, S b) { return b == S(-1) ? S(-U(a)) : b ? S(a / b) : S(-1); }, S, S, S>;                \
    t["div.u" #BITS] = each<[](U a, U b) { return b ? U(a / b) : U(-1); }, U, U, U>;                \
    t["rem.s" #BITS] = each<[](S a, S b) { return b == S(-1) ? S(0) : b ? S(a % b) : a; }, S, S, S>;                    \
    t["rem.u" #BITS] = each<[](U a, U b) { return b ? U(a % b) : a; }, U, U, U>;                    \
    t["min.s" #BITS] = each<[](S a, S b) { return std::min(a, b); }, S, S, S>;                      \
    t["max.s" #BITS] = each<[](S a, S b) { return std::max(a, b); }, S, S, S>;                      \
    t["min.u" #BITS] = each<[](U a, U b) { return std::min(a, b); }, U, U, U>;                      \
    t["max.u" #BITS] = each<[](U a, U b) { return std::max(a, b); }, U, U, U>;                      \
    t["max.relu.s" #BITS] = each<[](S a, S b) { return std::max({a, b, S(0)}); }, S, S, S>;         \
    t["min.relu.s" #BITS] = each<[](S a, S b) { return std::max(std::min(a, b), S(0)); }, S, S, S>; \
    t["neg.s" #BITS] = each<[](U a) { return U(-a); }, U, U>;                                       \
    t["abs.s" #BITS] = each<[](S a) { return U(a < 0 ? -U(a) : U(a)); }, U, S>;                     \
    t["not.b" #BITS] = each<[](U a) { return U(~a); }, U, U>;                                       \
    t["and.b" #BITS] = each<[](U a, U b) { return U(a & b); }, U, U, U>;                            \
    t["or.b" #BITS] = each<[](U a, U b) { return U(a | b); }, U, U, U>;                             \
    t["xor.b" #BITS] = each<[](U a, U b) { return U(a ^ b); }, U, U, U>;                            \
    t["shl.b" #BITS] = each<[](U a, u32 n) { return n >= BITS ? U(0) : U(a << n); }, U, U, u32>;    \
    t["shr.u" #BITS] = t["shr.b" #BITS] = each<[](U a, u32 n) { return shifted<U>(a, n); }, U, U, u32>; \
    t["shr.s" #BITS] = each<[](S a, u32 n) { return shifted<S>(a, n); }, S, S, u32>;                \
    t["selp.b" #BITS] = t["selp.u" #BITS] = t["selp.s" #BITS] = select<U>;
    INTEGERS(16, u16, s16)
    INTEGERS(32, u32, s32)
    INTEGERS(64, u64, s64)
#undef INTEGERS
    t["mul.wide.s32"] = each<[](s32 a, s32 b) { return s64(a) * b; }, s64, s32, s32>;
    t["mul.wide.u32"] = each<[](u32 a, u32 b) { return u64(a) * b; }, u64, u32, u32>;
    t["mul.wide.u16"] = each<[](u16 a, u16 b) { return u32(a) * b; }, u32, u16, u16>;
    t["mul.wide.s16"] = each<[](s16 a, s16 b) { return s32(a) * b; }, s32, s16, s16>;
    t["mad.wide.s32"] = each<[](s32 a, s32 b, u64 c) { return u64(s64(a) * b) + c; }, u64, s32, s32, u64>;
    t["mad.wide.u16"] = each<[](u16 a, u16 b, u32 c) { return u32(a) * b + c; }, u32, u16, u16, u32>;
    t["mad.wide.u32"] = each<[](u32 a, u32 b, u64 c) { return u64(a) * b + c; }, u64, u32, u32, u64>;
    t["mul.hi.s32"] = each<[](s32 a, s32 b) { return s32(s64(a) * b >> 32); }, s32, s32, s32>;
    t["mul.hi.u32"] = each<[](u32 a, u32 b) { return u32(u64(a) * b >> 32); }, u32, u32, u32>;
    t["mul.hi.u16"] = each<[](u16 a, u16 b) { return u16(u32(a) * b >> 16); }, u16, u16, u16>;
    t["add.s16x2"] = each<[](u32 a, u32 b) { return ((a + b) & 0xffff) | ((a & 0xffff0000) + (b & 0xffff0000)); }, u32, u32, u32>;
    t["sub.f16x2"] = each<[](u32 a, u32 b) { return float_to_half(HALF[a & 0xffff] - HALF[b & 0xffff]) | u32(float_to_half(HALF[a >> 16] - HALF[b >> 16])) << 16; }, u32, u32, u32>;
    t["sub.bf16x2"] = each<[](u32 a, u32 b) { return float_to_bf16(bf16_to_float(a & 0xffff) - bf16_to_float(b & 0xffff)) | u32(float_to_bf16(bf16_to_float(a >> 16) - bf16_to_float(b >> 16))) << 16; }, u32, u32, u32>;
    t["mul.f16"] = each<[](u16 a, u16 b) { return float_to_half(HALF[a] * HALF[b]); }, u16, u16, u16>;
    t["mul.f16x2"] = each<[](u32 a, u32 b) { return float_to_half(HALF[a & 0xffff] * HALF[b & 0xffff]) | u32(float_to_half(HALF[a >> 16] * HALF[b >> 16])) << 16; }, u32, u32, u32>;
    t["mul.hi.s16"] = each<[](s16 a, s16 b) { return s16(s32(a) * b >> 16); }, s16, s16, s16>;
    t["bfe.u32"] = each<field<u32>, u32, u32, u32, u32>;
    t["bfe.s32"] = each<field<s32>, s32, s32, u32, u32>;
    t["prmt.b32"] = each<pick, u32, u32, u32, u32>;
    t["lop3.b32"] = each<any_bits, u32, u32, u32, u32, u32>;
    t["popc.b32"] = each<[](u32 a) { return u32(std::popcount(a)); }, u32, u32>;
    t["mov.pred"] = predicate<[](u32 a, u32) { return a; }>;
    t["and.pred"] = predicate<[](u32 a, u32 b) { return a & b; }>;
    t["or.pred"] = predicate<[](u32 a, u32 b) { return a | b; }>;
    t["xor.pred"] = predicate<[](u32 a, u32 b) { return a ^ b; }>;
    t["not.pred"] = predicate<[](u32 a, u32) { return ~a; }>;
    t["unite.b32"] = unite, t["halve.b32"] = halve, t["unite.b64"] = unite_words, t["halve.b64"] = halve_words;

    // float32
    t["mov.f32"] = t["mov.b32"], t["selp.f32"] = t["selp.b32"];
    t["add.f32"] = t["add.rn.f32"] = each<[](float a, float b) { return a + b; }, float, float, float>;
    t["sub.f32"] = t["sub.rn.f32"] = each<[](float a, float b) { return a - b; }, float, float, float>;
    t["mul.f32"] = t["mul.rn.f32"] = each<[](float a, float b) { return a * b; }, float, float, float>;
    t["div.rn.f32"] = each<[](float a, float b) { return a / b; }, float, float, float>;
    t["div.full.f32"] = t["div.approx.f32"] = each<divided, float, float, float>;
    t["fma.rn.f32"] = each<[](float a, float b, float c) { return std::fma(a, b, c); }, float, float, float, float>;
    t["fma.rn.ftz.f32"] = each<[](float a, float b, float c) { return flushed(std::fma(flushed(a), flushed(b), flushed(c))); }, float, float, float, float>;
    t["fma.rn.sat.f32"] = each<[](float a, float b, float c) {
        float x = std::fma(a, b, c);
        return 0 < x ? std::min(x, 1.0f) : 0.0f;
    }, float, float, float, float>;
    t["max.f32"] = each<[](float a, float b) { return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b); }, float, float, float>;
    t["min.f32"] = each<[](float a, float b) { return a == b ? (std::signbit(a) ? a : b) : std::fmin(a, b); }, float, float, float>;
    t["max.NaN.f32"] = each<larger, float, float, float>;
    t["min.NaN.f32"] = each<smaller, float, float, float>;
    t["abs.f32"] = each<[](float a) { return std::fabs(a); }, float, float>;
    t["neg.f32"] = each<[](float a) { return -a; }, float, float>;
    t["copysign.f32"] = each<[](float a, float b) { return std::copysign(b, a); }, float, float, float>;
    t["ex2.approx.ftz.f32"] = each<[](float a) { return flushed(exponential(flushed(a))); }, float, float>;
    t["ex2.approx.f32"] = each<exponential, float, float>;
    t["lg2.approx.ftz.f32"] = each<[](float a) { return nearly(std::log2(flushed(a)), 1); }, float, float>;
    t["lg2.approx.f32"] = each<[](float a) { return nearly(std::log2(a), 1); }, float, float>;
    t["tanh.approx.f32"] = each<hyperbolic_tangent, float, float>;
    t["rcp.approx.ftz.f32"] = each<[](float a) { return flushed(reciprocal(flushed(a))); }, float, float>;

    // conversions
    t["cvt.s8.s32"] = each<[](s32 a) { return s16(int8_t(a)); }, s16, s32>;
    t["cvt.s64.s32"] = each<[](s32 a) { return s64(a); }, s64, s32>;
    t["cvt.u64.u32"] = each<[](u32 a) { return u64(a); }, u64, u32>;
    t["cvt.u32.u64"] = t["cvt.s32.s64"] = each<[](u64 a) { return u32(a); }, u32, u64>;
    t["cvt.u16.u32"] = t["cvt.u16.u64"] = each<[](u32 a) { return u16(a); }, u16, u32>;
    t["cvt.u32.u16"] = each<[](u16 a) { return u32(a); }, u32, u16>;
    t["cvt.u64.u16"] = each<[](u16 a) { return u64(a); }, u64, u16>;
    t["cvt.s32.s16"] = each<[](s16 a) { return s32(a); }, s32, s16>;
    t["cvt.s32.s8"] = each<[](u32 a) { return s32(int8_t(a)); }, s32, u32>;
    t["cvt.u32.u8"] = each<[](u32 a) { return a & 255; }, u32, u32>;
    t["cvt.rn.f32.s32"] = each<[](s32 a) { return float(a); }, float, s32>;
    t["cvt.rn.f32.u32"] = each<[](u32 a) { return float(a); }, float, u32>;
    t["cvt.rn.f32.s64"] = each<[](s64 a) { return float(a); }, float, s64>;
    t["cvt.rzi.s32.f32"] = each<truncated, s32, float>;
    t["cvt.rpi.ftz.f32.f32"] = each<[](float a) { return std::ceil(flushed(a)); }, float, float>;
    t["cvt.rpi.f32.f32"] = each<[](float a) { return std::ceil(a); }, float, float>;
    t["cvt.rmi.f32.f32"] = each<[](float a) { return std::floor(a); }, float, float>;
    t["cvt.f32.bf16"] = each<bf16_to_float, float, u16>;
    t["cvt.f32.f16"] = each<[](u16 a) { return HALF[a]; }, float, u16>;
    t["cvt.rn.f32.s16"] = each<[](s16 a) { return float(a); }, float, s16>;
    t["cvt.rn.bf16.f32"] = each<float_to_bf16, u16, float>;
    t["cvt.rn.f16.f32"] = each<float_to_half, u16, float>;
    t["cvt.rn.bf16x2.f32"] = each<[](float a, float b) { return float_to_bf16(b) | u32(float_to_bf16(a)) << 16; }, u32, float, float>;
    t["cvt.rn.f16x2.f32"] = each<[](float a, float b) { return float_to_half(b) | u32(float_to_half(a)) << 16; }, u32, float, float>;
    t["cvt.rn.satfinite.e4m3x2.f32"] = each<[](float a, float b) { return u16(float_to_e4m3(b) | float_to_e4m3(a) << 8); }, u16, float, float>;
    t["cvt.rn.satfinite.e5m2x2.f32"] = each<[](float a, float b) { return u16(float_to_e5m2(b) | float_to_e5m2(a) << 8); }, u16, float, float>;
    t["cvt.rn.satfinite.e4m3x2.f16x2"] = each<[](u32 a) { return u16(FROM_HALF[0][a & 0xffff] | FROM_HALF[0][a >> 16] << 8); }, u16, u32>;
    t["cvt.rn.satfinite.e5m2x2.f16x2"] = each<[](u32 a) { return u16(FROM_HALF[1][a & 0xffff] | FROM_HALF[1][a >> 16] << 8); }, u16, u32>;
    t["cvt.rn.f16x2.e4m3x2"] = each<[](u16 a) { return float_to_half(E4M3[a & 255]) | u32(float_to_half(E4M3[a >> 8])) << 16; }, u32, u16>;
    t["cvt.rn.f16x2.e5m2x2"] = each<[](u16 a) { return float_to_half(E5M2[a & 255]) | u32(float_to_half(E5M2[a >> 8])) << 16; }, u32, u16>;

#define COMPARISON(NAME, T, F)                                              \
    {                                                                       \
        auto [plain, both, either] = comparisons<F, T>();                   \
        t["setp." NAME] = plain;                                            \
        std::string name(NAME);                                             \
        size_t dot = name.rfind('.');                                       \
        t["setp." + name.substr(0, dot) + ".and" + name.substr(dot)] = both; \
        t["setp." + name.substr(0, dot) + ".or" + name.substr(dot)] = either; \
    }
#define COMPARISONS(BITS, U, S)                                             \
    COMPARISON("eq.b" BITS, U, [](U a, U b) { return a == b; })             \
    COMPARISON("eq.s" BITS, U, [](U a, U b) { return a == b; })             \
    COMPARISON("eq.u" BITS, U, [](U a, U b) { return a == b; })             \
    COMPARISON("ne.b" BITS, U, [](U a, U b) { return a != b; })             \
    COMPARISON("ne.s" BITS, U, [](U a, U b) { return a != b; })             \
    COMPARISON("ne.u" BITS, U, [](U a, U b) { return a != b; })             \
    COMPARISON("lt.u" BITS, U, [](U a, U b) { return a < b; })              \
    COMPARISON("le.u" BITS, U, [](U a, U b) { return a <= b; })             \
    COMPARISON("gt.u" BITS, U, [](U a, U b) { return b < a; })              \
    COMPARISON("ge.u" BITS, U, [](U a, U b) { return a >= b; })             \
    COMPARISON("lt.s" BITS, S, [](S a, S b) { return a < b; })              \
    COMPARISON("le.s" BITS, S, [](S a, S b) { return a <= b; })             \
    COMPARISON("gt.s" BITS, S, [](S a, S b) { return b < a; })              \
    COMPARISON("ge.s" BITS, S, [](S a, S b) { return a >= b; })
    COMPARISONS("16", u16, s16)
    COMPARISONS("32", u32, s32)
    COMPARISONS("64", u64, s64)
    COMPARISON("eq.f32", float, [](float a, float b) { return a == b; })
    COMPARISON("ne.f32", float, [](float a, float b) { return a < b || b < a; })
    COMPARISON("lt.f32", float, [](float a, float b) { return a < b; })
    COMPARISON("le.f32", float, [](float a, float b) { return a <= b; })
    COMPARISON("gt.f32", float, [](float a, float b) { return b < a; })
    COMPARISON("ge.f32", float, [](float a, float b) { return a >= b; })
    COMPARISON("equ.f32", float, [](float a, float b) { return !(a < b || b < a); })
    COMPARISON("neu.f32", float, [](float a, float b) { return a != b; })
    COMPARISON("ltu.f32", float, [](float a, float b) { return !(a >= b); })
    COMPARISON("leu.f32", float, [](float a, float b) { return !(b < a); })
    COMPARISON("gtu.f32", float, [](float a, float b) { return !(a <= b); })
    COMPARISON("geu.f32", float, [](float a, float b) { return !(a < b); })
    COMPARISON("nan.f32", float, [](float a, float b) { return std::isnan(a) || std::isnan(b); })
    COMPARISON("num.f32", float, [](float a, float b) { return !std::isnan(a) && !std::isnan(b); })
#undef COMPARISONS
#undef COMPARISON

    // memory
#define MEMORY(BITS, T)                                                     \
    t["ld.param.b" BITS] = load_parameter<T>;                               \
    t["ld.global.b" BITS] = load_global<T, 1>, t["st.global.b" BITS] = store_global<T, 1>;             \
    t["ld.global.v2.b" BITS] = load_global<T, 2>, t["st.global.v2.b" BITS] = store_global<T, 2>;       \
    t["ld.global.v4.b" BITS] = load_global<T, 4>, t["st.global.v4.b" BITS] = store_global<T, 4>;       \
    t["ld.shared.b" BITS] = load_shared<T, 1>, t["st.shared.b" BITS] = store_shared<T, 1>;             \
    t["ld.shared.v2.b" BITS] = load_shared<T, 2>, t["st.shared.v2.b" BITS] = store_shared<T, 2>;       \
    t["ld.shared.v4.b" BITS] = load_shared<T, 4>, t["st.shared.v4.b" BITS] = store_shared<T, 4>;
    MEMORY("8", u8)
    MEMORY("16", u16)
    MEMORY("32", u32)
    MEMORY("64", u64)
#undef MEMORY
    t["ld.param.s32"] = load_parameter<s32, s64>;  // only into wider registers
    t["cvta.param.u64"] = parameter_address;
    t["atom.global.gpu.relaxed.add.u32"] = t["atom.global.gpu.acq_rel.add.u32"] = atomic<[](u32 a, u32 b) { return a + b; }>;
#define MATRICES(N)                                                                         \
    t["ldmatrix.sync.aligned.m8n8.x" #N ".shared.b16"] = load_matrix<N, false>;             \
    t["ldmatrix.sync.aligned.m8n8.x" #N ".trans.shared.b16"] = load_matrix<N, true>;        \
    t["stmatrix.sync.aligned.m8n8.x" #N ".shared.b16"] = store_matrix<N, false>;            \
    t["stmatrix.sync.aligned.m8n8.x" #N ".trans.shared.b16"] = store_matrix<N, true>;
    MATRICES(1)
    MATRICES(2)
    MATRICES(4)
#undef MATRICES

    // lanes, warps
    t["shfl.sync.bfly.b32"] = shuffle<Ask::BUTTERFLY>;
    t["shfl.sync.up.b32"] = shuffle<Ask::UP>;
    t["shfl.sync.idx.b32"] = shuffle<Ask::INDEX>;
    t["redux.sync.max.s32"] = reduce<[](s32 a, s32 b) { return std::max(a, b); }, s32>;
    t["redux.sync.min.s32"] = reduce<[](s32 a, s32 b) { return std::min(a, b); }, s32>;
    t["redux.sync.max.u32"] = reduce<[](u32 a, u32 b) { return std::max(a, b); }, u32>;
    t["redux.sync.min.u32"] = reduce<[](u32 a, u32 b) { return std::min(a, b); }, u32>;
    t["redux.sync.add.s32"] = t["redux.sync.add.u32"] = reduce<[](u32 a, u32 b) { return a + b; }, u32>;
    t["redux.sync.or.b32"] = reduce<[](u32 a, u32 b) { return a | b; }, u32>;
    t["vote.sync.any.pred"] = vote<false>, t["vote.sync.all.pred"] = vote<true>;
    t["elect.sync"] = elect;
    t["bar.sync"] = t["barrier.sync"] = meet, t["bar.arrive"] = pass_by;
    t["bar.warp.sync"] = t["setmaxnreg.inc.sync.aligned.u32"] = t["setmaxnreg.dec.sync.aligned.u32"] = nothing;
    t["nanosleep.u32"] = nothing;
    t["fence.proxy.async.shared"] = fence;
    t["trap"] = trap;
    t["mbarrier.init.shared.b64"] = make_barrier, t["mbarrier.inval.shared.b64"] = end_barrier;
    t["mbarrier.arrive.shared.b64"] = arrive, t["mbarrier.arrive.expect_tx.shared.b64"] = expect;
    t["cp.async.mbarrier.arrive.noinc.shared.b64"] = arrive_after_copies;
    t["cp.async.cg.shared.global"] = copy_small;
    t["mbarrier.try_wait.parity.shared.b64"] = await;
    t["cp.async.bulk.prefetch.L2.global"] = prefetch, t["prefetch.global.L2"] = prefetch_line;
    for (std::string rank : {"2d", "3d", "4d", "5d"})
        for (std::string where : {".shared", ".shared::cluster"})
            t["cp.async.bulk.tensor." + rank + where + ".global.mbarrier::complete_tx::bytes"] = copy_box;
#define PRODUCTS(N)                                                                                                  \
    t["wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16"] = product<Kind::BF16, N>; \
    t["wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16"] = product<Kind::FP16, N>; \
    t["wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"] = product<Kind::E4M3, N>; \
    t["wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e5m2.e5m2"] = product<Kind::E5M2, N>;
    PRODUCTS(8)
    PRODUCTS(16)
    PRODUCTS(32)
    PRODUCTS(64)
    PRODUCTS(96)
    PRODUCTS(128)
    PRODUCTS(192)
    PRODUCTS(256)
#undef PRODUCTS
    t["wgmma.fence.sync.aligned"] = nothing;
    // launches follow one another here
    t["griddepcontrol.launch_dependents"] = t["griddepcontrol.wait"] = nothing;
    t["wgmma.commit_group.sync.aligned"] = commit;
    t["wgmma.wait_group.sync.aligned"] = await_products;
    return t;
}
