// The tensor cores: products of a warpgroup, of which each warp computes its own rows.
#pragma once

#include <cstring>

#include "machine.h"

enum class Kind { BF16, FP16, E4M3, E5M2 };
template <Kind K>
static float number(const u8* p) {
    if constexpr (K == Kind::BF16 || K == Kind::FP16) {
        u16 x;
        std::memcpy(&x, p, 2);
        return K == Kind::BF16 ? bf16_to_float(x) : HALF[x];
    } else {
        return (K == Kind::E4M3 ? E4M3 : E5M2)[*p];
    }
}

static u64 added(u64 sum, const u8* word) {
    u64 halves[2];
    std::memcpy(halves, word, 16);
    return ((sum ^ halves[0]) * 0x9e3779b97f4a7c15ull ^ halves[1]) * 0xc2b2ae3d27d4eb4full;
}

static u64 sum_of(Program& program, const Matrix& m) {
    u64 sum = 0;
    for (u32 line = 0; line < m.lines; line++)
        for (u32 byte = 0; byte < m.bytes; byte += 16) sum = added(sum, program.memory(m.address(line, byte), 16));
    return sum;
}

// Its lines as numbers; nobody may write there until they were waited for.
template <Kind K>
static void read(Warp& w, const Matrix& m, float* numbers, size_t per_line) {
    constexpr u32 BYTES = K == Kind::BF16 || K == Kind::FP16 ? 2 : 1;
    u64 sum = 0;
    for (u32 line = 0; line < m.lines; line++)
        for (u32 byte = 0; byte < m.bytes; byte += 16) {
            const u8* word = w.program->to_multiply(m.address(line, byte));
            sum = added(sum, word);
            for (u32 i = 0; i < 16; i += BYTES) numbers[line * per_line + (byte + i) / BYTES] = number<K>(word + i);
        }
    w.groups.back().push_back({m, sum});
}

// Lane 4 i + j has columns 2 j and 2 j + 1 of each 8, in rows i and i + 8.
template <auto F>
static void accumulators(Warp& w, const s64* o, int columns, Rows& rows) {
    for (int n = 0; n < columns; n++)
        for (int half = 0; half < 2; half++) {
            u32* r = w.at(o[n / 8 * 4 + half * 2 + n % 2]);
            for (int i = 0; i < 8; i++) F(r, i * 4 + n % 8 / 2, rows[i + 8 * half][n]);
        }
}

// What is in flight for these registers, or what they hold; they hold no numbers from now on.
static Rows& begin(Warp& w, const s64* o, int columns, bool adds) {
    Result& result = w.results[o[0]];
    if (!result.registers) {
        result.registers = o, result.columns = columns;
        accumulators<[](u32* r, int lane, float& x) {
            x = get<float>(r, lane);
            put<float>(r, lane, std::nanf(""));
        }>(w, o, columns, result.rows);
    }
    result.group = w.waited + s64(w.groups.size()) - 1;
    if (!adds)
        for (auto& row : result.rows) std::fill(row, row + columns, 0.0f);
    return result.rows;
}

// A warp's 16 rows of the product of 64 x k and k x columns: accumulators, a (registers or a matrix), b, whether to add,
// signs of a and b, which of them are transposed.
template <Kind T>
static void multiply(Warp& w, const s64* o, int count, int columns) {
    constexpr int BYTES = T == Kind::BF16 || T == Kind::FP16 ? 2 : 1, K = 32 / BYTES, WORD = 4 / BYTES;
    static float a[64][K], b[K][256], across[256 * K];
    bool registers = count == columns / 2 + (BYTES == 2 ? 9 : 8);
    const s64 *accumulated = o, *flags = o + count - (BYTES == 1 ? 3 : registers ? 4 : 5);
    bool adds = *w.at(flags[0]) != 0, a_transposed = BYTES == 2 && !registers && *w.at(flags[3]);
    bool b_transposed = BYTES == 2 && *w.at(o[count - 1]);
    if (s32(*w.at(flags[1])) != 1 || s32(*w.at(flags[2])) != 1) fail("a product of negated operands");
    if (count != columns / 2 + (registers ? 4 : 1) + 1 + int(o + count - flags)) fail("a product of other operands");
    u32 first = registers ? 0 : u32(w.number % 4 * 16);  // row of a
    o += columns / 2;
    if (registers) {
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 32; i++)
                for (int k = 0; k < WORD; k++) {
                    u32 bits = w.at(o[r])[i] >> 8 * BYTES * k;
                    a[i / 4 + r % 2 * 8][r / 2 * K / 2 + i % 4 * WORD + k] = number<T>(reinterpret_cast<u8*>(&bits));
                }
        o += 4;
    } else if (a_transposed) {
        read<T>(w, Matrix(wide(w.at(*o++), 0), true, K, 64 * BYTES), across, 64);
        for (int i = 0; i < 64 * K; i++) a[i % 64][i / 64] = across[i];
    } else {
        read<T>(w, Matrix(wide(w.at(*o++), 0), false, 64, 32), a[0], K);
    }
    if (b_transposed) {
        read<T>(w, Matrix(wide(w.at(*o), 0), true, K, u32(columns) * BYTES), b[0], 256);
    } else {
        read<T>(w, Matrix(wide(w.at(*o), 0), false, u32(columns), 32), across, K);
        for (int i = 0; i < columns * K; i++) b[i % K][i / K] = across[i];
    }
    Rows& acc = begin(w, accumulated, columns, adds);
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < K; k++)
            for (int n = 0; n < columns; n++) acc[i][n] += a[first + u32(i)][k] * b[k][n];
}

template <Kind T, int COLUMNS>
static void product(Warp& w, const s64* o, int count, u32) {
    multiply<T>(w, o, count, COLUMNS);
}

static void commit(Warp& w, const s64*, int, u32) { w.groups.emplace_back(); }

static void await_products(Warp& w, const s64* o, int, u32) {  // until so many groups are in flight
    bool changed = false;
    if (!w.groups.empty() && w.machine->random() & 1) w.yields = true;  // others may write what is read
    for (size_t left = *w.at(o[0]) + 1; w.groups.size() > left; w.groups.pop_front(), w.waited++)
        for (const Operand& x : w.groups.front()) changed |= sum_of(*w.program, x.matrix) != x.sum;
    for (auto at = w.results.begin(); at != w.results.end();) {
        auto& [registers, columns, group, rows] = at->second;
        if (group >= w.waited) {
            ++at;
            continue;
        }
        if (changed)  // of what nobody looks at this does no harm
            for (auto& row : rows) std::fill(row, row + columns, std::nanf(""));
        accumulators<[](u32* r, int lane, float& x) { put<float>(r, lane, x); }>(w, registers, columns, rows);
        at = w.results.erase(at);
    }
}
