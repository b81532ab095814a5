// What there is: warps and their registers, programs and their shared memory, what is under way.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"

constexpr u32 ALL = 0xffffffff;
constexpr u32 UNWRITTEN = 0x7fc0dead;   // no number of any size; as in assembly.py
constexpr u64 MOST_PARAMETERS = 16384;  // bytes; as in machine.py
constexpr u32 SHARED_BASE = 1024;       // the first KB of shared memory is the system's; as in ptx.py

[[noreturn]] static void fail(const std::string& what) { throw std::runtime_error(what); }

struct Op {
    int name;   // which instruction
    s64 guard;  // 0: none; else 1 + where its predicate lies, negative where that has to be false
    int first;  // operand
    int count;
};

struct Box {  // what a descriptor of the copy engine holds here; sizes of the innermost axis first
    u64 base;
    s32 element, rank;
    s64 sizes[5], strides[5];
    s32 box[5];
    u32 swizzle;
};

struct Barrier {
    bool alive = false;
    u32 phase = 0;
    s32 count = 0, pending = 0;
    s64 bytes = 0;
    std::vector<u32> copied[2];  // by threads: words of 16 bytes that whoever waits for a phase may read, by its parity
    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count, copied[phase].clear();
    }
};

struct Small {  // 16 bytes that a thread copies by itself, or zeros instead of some
    u32 target;
    u64 source;
    u32 bytes;
};

struct Arrival {  // of a thread, when all that it has copied by itself is there
    u32 barrier;
    std::vector<Small> copies;
    bool late;
};

struct Copy {  // of a box at these coordinates
    Box box;
    std::array<s32, 5> at;
    u32 target, barrier;
    bool late;  // until nothing else can happen
};

static u32 swizzled(u32 address, u32 bytes) {  // words of 16 bytes change places in rows of so many bytes
    return bytes ? address ^ ((address >> 7 & (bytes / 16 - 1)) << 4) : address;
}

struct Matrix {  // in shared memory, as a product is told of it: lines of so many bytes of the axis that is contiguous
    u32 start, leading, stride;
    u32 swizzle;
    bool transposed;
    u32 lines, bytes;
    Matrix(u64 d, bool transposed, u32 lines, u32 bytes)
        : start(u32(d & 0x3fff) << 4), leading(u32(d >> 16 & 0x3fff) << 4), stride(u32(d >> 32 & 0x3fff) << 4),
          swizzle(std::array{0, 128, 64, 32}[d >> 62]), transposed(transposed), lines(lines), bytes(bytes) {
        if (d >> 49 & 7) fail("a matrix with a base offset");
        if (!swizzle && transposed) fail("a transposed matrix that is not swizzled");
    }
    u32 address(u32 line, u32 byte) const {
        if (!swizzle) return start + byte / 16 * leading + byte % 16 + line / 8 * stride + line % 8 * 16;
        u32 along = transposed ? byte / swizzle * leading + byte % swizzle : byte;
        return swizzled(start + along + line / 8 * stride + line % 8 * swizzle, swizzle);
    }
};

struct Operand {  // of a product in flight: shared memory that nobody may write
    Matrix matrix;
    u64 sum;
};

using Rows = float[16][256];  // of a warp: accumulators of a product

struct Result {  // what registers hold once it was waited for; no numbers before
    const s64* registers;
    int columns;
    s64 group;  // the last one that adds to it
    Rows rows;
};

struct Machine;
struct Program;

struct Part {  // lanes of a warp that are at the same place
    int at;
    u32 lanes;
};

struct Warp {
    Machine* machine;
    Program* program;
    int number;  // in the program
    // of registers: 32 for up to 32 bits of each lane, 32 more for the upper half of 64; a predicate is one word
    std::vector<u32> words;
    std::vector<Part> parts{{0, ALL}};
    std::deque<std::vector<Operand>> groups{{}};  // of products in flight; the last one is open
    s64 waited = 0;                               // groups before these
    std::map<s64, Result> results;                // in flight, by the first register
    std::vector<std::pair<u32, u32>> written;     // words of 16 bytes, without a fence since, and their changes then
    bool yields = false;                          // its turn
    bool polls = false, waits = false;            // for a barrier in shared memory; at one of the program
    std::array<std::vector<Small>, 32> small;     // of each thread, which no barrier has been told of
    u32* at(s64 place) { return words.data() + place; }
};

struct Word {
    u32 changes = 0;
    bool unfenced = false;  // a thread has changed it, and nobody who wrote the same has fenced it since
};

struct Program {
    int number;
    std::vector<u8> shared;
    std::vector<Word> words;       // of the shared memory, 16 bytes each
    std::vector<Barrier> barriers;
    std::vector<Copy> copies;       // under way
    std::vector<Arrival> arrivals;  // likewise
    std::array<int, 16> arrived{}, expected{};  // threads at each named barrier
    std::array<std::vector<Warp*>, 16> waiting;
    std::vector<std::unique_ptr<Warp>> warps;

    Program(int number, size_t bytes)
        : number(number), shared(bytes, 0xff), words(bytes / 16 + 1), barriers(bytes / 8 + 1) {}
    u8* memory(u32 address, u32 bytes) {
        if (address < SHARED_BASE || address + u64(bytes) > SHARED_BASE + shared.size())
            fail("shared memory has no byte " + std::to_string(s64(address) + bytes - 1 - SHARED_BASE));
        if (address % std::min(bytes, 16u)) fail("shared memory is read or written across words");
        return shared.data() + (address - SHARED_BASE);
    }
    void check_barriers(u32 address, u32 bytes) {
        for (u32 i = (address - SHARED_BASE) / 8; i * 8 < address - SHARED_BASE + bytes; i++)
            if (barriers[i].alive) fail("a barrier is overwritten");
    }
    // As threads do.  Who writes what is there already may fence it for others.
    void write(Warp& w, u32 address, const void* values, u32 bytes) {
        u8* found = memory(address, bytes);
        check_barriers(address, bytes);
        u32 number = (address - SHARED_BASE) / 16;
        if (std::memcmp(found, values, bytes)) words[number].changes++, words[number].unfenced = true;
        std::memcpy(found, values, bytes);
        w.written.push_back({number, words[number].changes});
    }
    u8* to_copy(u32 address, u32 bytes) {
        u8* found = memory(address, bytes);
        check_barriers(address, bytes);
        Word& word = words[(address - SHARED_BASE) / 16];
        if (word.unfenced) fail("a box overwrites what was written without a fence since");
        word.changes++;
        return found;
    }
    const u8* to_multiply(u32 address) {
        const u8* found = memory(address, 16);
        if (words[(address - SHARED_BASE) / 16].unfenced) fail("a product reads what was written without a fence since");
        return found;
    }
    Barrier& barrier(u32 address) {
        memory(address, 8);
        Barrier& found = barriers[(address - SHARED_BASE) / 8];
        if (!found.alive) fail("no barrier has been made there");
        return found;
    }
};

// An instruction: of which warp, with which operands, how many, for which lanes.
using Run = void (*)(Warp&, const s64*, int, u32);

struct Machine {
    std::vector<Op> ops;
    std::vector<s64> operands;
    std::vector<Run> runs;                    // by name
    std::vector<bool> together;               // whether all lanes of a warp have to be there
    u64 parameters = 0;                       // their address
    std::vector<std::pair<u64, u64>> memory;  // ranges of addresses that exist
    size_t last = 0;                          // of these, which was asked for
    std::mt19937_64 random;
    s64 events = 0;  // that may let a warp go on
    s64 left = 0;    // instructions until it is taken for endless

    void check(u64 address, u64 bytes) {
        if (address % std::min<u64>(bytes & -bytes, 16)) fail("memory is read or written across words");
        auto inside = [&](const auto& x) { return address >= x.first && address < x.second && bytes <= x.second - address; };
        if (last < memory.size() && inside(memory[last])) return;
        for (size_t i = 0; i < memory.size(); i++)
            if (inside(memory[i])) {
                last = i;
                return;
            }
        fail("no tensor of this launch has " + std::to_string(bytes) + " bytes at address " + std::to_string(address));
    }
};

static u64 wide(const u32* r, int lane) { return r[lane] | u64(r[lane + 32]) << 32; }

template <class T>
static T get(const u32* r, int lane) {
    if constexpr (sizeof(T) == 8) return std::bit_cast<T>(wide(r, lane));
    else if constexpr (sizeof(T) == 4) return std::bit_cast<T>(r[lane]);
    else return T(r[lane]);
}

template <class T>
static void put(u32* r, int lane, T value) {
    if constexpr (sizeof(T) == 8) {
        u64 bits = std::bit_cast<u64>(value);
        r[lane] = u32(bits), r[lane + 32] = u32(bits >> 32);
    } else if constexpr (sizeof(T) == 4) {
        r[lane] = std::bit_cast<u32>(value);
    } else {
        r[lane] = u32(std::make_unsigned_t<T>(value));
    }
}

static void set_bits(u32* p, u32 bits, u32 lanes) { *p = (*p & ~lanes) | (bits & lanes); }
