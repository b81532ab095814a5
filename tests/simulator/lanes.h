// Instructions that each lane executes for itself, and those by which the lanes of a warp ask each other.
#pragma once

#include <cstring>

#include "machine.h"

// The one number that is none, of all there are.
template <class D, class T>
static D proper(T x) {
    if constexpr (std::is_same_v<D, float>)
        if (std::isnan(x)) return std::bit_cast<float>(0x7fffffff);
    return D(x);
}

// D = f(S...), lane by lane
template <auto F, class D, class... S>
static void each(Warp& w, const s64* o, int count, u32 lanes) {
    if (count != 1 + sizeof...(S)) fail("an instruction of other operands");
    [&]<size_t... I>(std::index_sequence<I...>) {
        u32* d = w.at(o[0]);
        std::array<const u32*, sizeof...(S)> s{w.at(o[I + 1])...};
        if (lanes == ALL)
            for (int i = 0; i < 32; i++) put<D>(d, i, proper<D>(F(get<S>(s[I], i)...)));
        else
            for (int i = 0; i < 32; i++)
                if (lanes >> i & 1) put<D>(d, i, proper<D>(F(get<S>(s[I], i)...)));
    }(std::index_sequence_for<S...>());
}

enum class Join { NONE, AND, OR };

// p = f(a, b), with or without another predicate
template <auto F, class S, Join J>
static void compare(Warp& w, const s64* o, int count, u32 lanes) {
    if (count != 3 + (J != Join::NONE)) fail("a comparison of other operands");
    const u32 *a = w.at(o[1]), *b = w.at(o[2]);
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= u32(bool(F(get<S>(a, i), get<S>(b, i)))) << i;
    if constexpr (J == Join::AND) bits &= *w.at(o[3]);
    if constexpr (J == Join::OR) bits |= *w.at(o[3]);
    set_bits(w.at(o[0]), bits, lanes);
}

template <auto F>
static void predicate(Warp& w, const s64* o, int count, u32 lanes) {
    set_bits(w.at(o[0]), F(*w.at(o[1]), count > 2 ? *w.at(o[2]) : 0), lanes);
}

template <class T>
static void select(Warp& w, const s64* o, int, u32 lanes) {
    const u32 *a = w.at(o[1]), *b = w.at(o[2]), p = *w.at(o[3]);
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) put<T>(w.at(o[0]), i, get<T>(p >> i & 1 ? a : b, i));
}

// mov between one register and two of half its size
static void unite(Warp& w, const s64* o, int count, u32 lanes) {  // b32 of two b16
    if (count != 3) fail("a move of other operands");
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) w.at(o[0])[i] = (w.at(o[1])[i] & 0xffff) | w.at(o[2])[i] << 16;
}
static void halve(Warp& w, const s64* o, int count, u32 lanes) {
    if (count != 3) fail("a move of other operands");
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u32 x = w.at(o[2])[i];
            w.at(o[0])[i] = x & 0xffff, w.at(o[1])[i] = x >> 16;
        }
}
static void unite_words(Warp& w, const s64* o, int count, u32 lanes) {  // b64 of two b32
    if (count != 3) fail("a move of other operands");
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u64 x = w.at(o[1])[i] | u64(w.at(o[2])[i]) << 32;
            put<u64>(w.at(o[0]), i, x);
        }
}
static void halve_words(Warp& w, const s64* o, int count, u32 lanes) {
    if (count != 3) fail("a move of other operands");
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u64 x = wide(w.at(o[2]), i);
            w.at(o[0])[i] = u32(x), w.at(o[1])[i] = u32(x >> 32);
        }
}

enum class Ask { BUTTERFLY, UP, INDEX };
template <Ask A>
static void shuffle(Warp& w, const s64* o, int count, u32) {
    if (count != 5 || (*w.at(o[3]) != 31 && A != Ask::UP) || *w.at(o[4]) != ALL) fail("a shuffle of some lanes");
    u32 result[32];
    const u32* a = w.at(o[1]);
    for (int i = 0; i < 32; i++) {
        int b = int(w.at(o[2])[i]), from = A == Ask::BUTTERFLY ? i ^ b : A == Ask::UP ? i - b : b & 31;
        result[i] = a[from < 0 || from > 31 ? i : from];
    }
    std::memcpy(w.at(o[0]), result, sizeof result);
}
template <auto F, class T>
static void reduce(Warp& w, const s64* o, int, u32) {
    T total = get<T>(w.at(o[1]), 0);
    for (int i = 1; i < 32; i++) total = F(total, get<T>(w.at(o[1]), i));
    for (int i = 0; i < 32; i++) put<T>(w.at(o[0]), i, total);
}
template <bool EVERY>
static void vote(Warp& w, const s64* o, int, u32) {
    u32 p = *w.at(o[1]);
    *w.at(o[0]) = (EVERY ? p == ALL : p != 0) ? ALL : 0;
}
static void elect(Warp& w, const s64* o, int, u32) {
    for (int i = 0; i < 32; i++) w.at(o[0])[i] = 0;
    *w.at(o[1]) = 1;
}
