// Loads, stores and atomics.
#pragma once

#include <cstring>

#include "machine.h"

template <class T, int N>
static void load_global(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u64 address = wide(w.at(o[N]), i) + o[N + 1];
            w.machine->check(address, sizeof(T) * N);
            T values[N];
            std::memcpy(values, reinterpret_cast<void*>(address), sizeof values);
            for (int n = 0; n < N; n++) put<T>(w.at(o[n]), i, values[n]);
        }
}
template <class T, int N>
static void store_global(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u64 address = wide(w.at(o[0]), i) + o[1];
            w.machine->check(address, sizeof(T) * N);
            T values[N];
            for (int n = 0; n < N; n++) values[n] = get<T>(w.at(o[n + 2]), i);
            std::memcpy(reinterpret_cast<void*>(address), values, sizeof values);
        }
}
template <class T, int N>
static void load_shared(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            T values[N];
            std::memcpy(values, w.program->memory(w.at(o[N])[i] + u32(o[N + 1]), sizeof values), sizeof values);
            for (int n = 0; n < N; n++) put<T>(w.at(o[n]), i, values[n]);
        }
}
template <class T, int N>
static void store_shared(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            T values[N];
            for (int n = 0; n < N; n++) values[n] = get<T>(w.at(o[n + 2]), i);
            w.program->write(w, w.at(o[0])[i] + u32(o[1]), values, sizeof values);
        }
}
// Parameters have addresses of their own, from 0 on.
template <class T, class R = T>
static void load_parameter(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            T value;
            std::memcpy(&value, reinterpret_cast<void*>(w.machine->parameters + w.at(o[1])[i] + u64(o[2])), sizeof value);
            put<R>(w.at(o[0]), i, value);
        }
}
static void parameter_address(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) put<u64>(w.at(o[0]), i, w.machine->parameters + w.at(o[1])[i]);
}
template <auto F>
static void atomic(Warp& w, const s64* o, int, u32 lanes) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u64 address = wide(w.at(o[1]), i) + o[2];
            w.machine->check(address, 4);
            u32& word = *reinterpret_cast<u32*>(address);
            u32 before = word;
            word = F(before, w.at(o[3])[i]);
            w.at(o[0])[i] = before;
        }
    w.machine->events++;
}

template <int N, bool TRANSPOSED>
static void load_matrix(Warp& w, const s64* o, int, u32) {  // of 8 x 8 elements of 16 bits
    u16 rows[N][8][8];
    for (int i = 0; i < 8 * N; i++)
        std::memcpy(rows[i / 8][i % 8], w.program->memory(w.at(o[N])[i] + u32(o[N + 1]), 16), 16);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 32; i++) {
            u16 pair[2];
            for (int k = 0; k < 2; k++) pair[k] = TRANSPOSED ? rows[n][i % 4 * 2 + k][i / 4] : rows[n][i / 4][i % 4 * 2 + k];
            w.at(o[n])[i] = pair[0] | u32(pair[1]) << 16;
        }
}
template <int N, bool TRANSPOSED>
static void store_matrix(Warp& w, const s64* o, int, u32) {
    for (int n = 0; n < N; n++) {
        u16 rows[8][8];
        for (int i = 0; i < 32; i++)
            for (int k = 0; k < 2; k++) {
                u16 x = u16(w.at(o[n + 2])[i] >> 16 * k);
                (TRANSPOSED ? rows[i % 4 * 2 + k][i / 4] : rows[i / 4][i % 4 * 2 + k]) = x;
            }
        for (int i = 0; i < 8; i++)
            w.program->write(w, w.at(o[0])[8 * n + i] + u32(o[1]), rows[i], 16);
    }
}

// What this warp's threads have written is there for the copy engine and the tensor cores from now on.
static void fence(Warp& w, const s64*, int, u32) {
    for (auto [number, changes] : w.written) {
        Word& word = w.program->words[number];
        if (word.changes == changes) word.unfenced = false;
    }
    w.written.clear();
}
