// Where threads meet, and barriers in shared memory.
#pragma once

#include "machine.h"

// A warp arrives at a barrier of the program, and may have to wait for the others.
static void arrive_at_number(Warp& w, const s64* o, int count, bool waits) {  // number, threads
    int number = int(*w.at(o[0]));
    int threads = count > 1 ? int(*w.at(o[1])) : int(32 * w.program->warps.size());
    auto& waiting = w.program->waiting.at(number);
    int& arrived = w.program->arrived.at(number);
    int& expected = w.program->expected.at(number);
    if (arrived && expected != threads) fail("a barrier of different numbers of threads");
    expected = threads;
    arrived += 32;
    if (arrived > threads) fail("more threads than expected meet at barrier " + std::to_string(number));
    if (arrived == threads) {
        for (Warp* other : waiting) other->waits = false;
        waiting.clear();
        arrived = 0;
        w.machine->events++;
    } else if (waits) {
        w.waits = true;
        waiting.push_back(&w);
    }
}
static void meet(Warp& w, const s64* o, int count, u32) { arrive_at_number(w, o, count, true); }
static void pass_by(Warp& w, const s64* o, int count, u32) { arrive_at_number(w, o, count, false); }

template <auto F>
static void at_barriers(Warp& w, const s64* o, u32 lanes, int place) {
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) F(w, w.at(o[place])[i] + u32(o[place + 1]), i, o);
    w.machine->events++;
}
static void make_barrier(Warp& w, const s64* o, int, u32 lanes) {
    at_barriers<[](Warp& w, u32 address, int i, const s64* o) {
        s32 count = s32(w.at(o[2])[i]);
        if (count < 1) fail("a barrier of nobody");
        w.program->memory(address, 8);
        w.program->barriers[(address - SHARED_BASE) / 8] = {true, 0, count, count, 0};
    }>(w, o, lanes, 0);
}
static void end_barrier(Warp& w, const s64* o, int, u32 lanes) {
    at_barriers<[](Warp& w, u32 address, int, const s64*) { w.program->barrier(address).alive = false; }>(w, o, lanes, 0);
}
static void arrive_at(Warp& w, u32 address) {
    Barrier& b = w.program->barrier(address);
    if (b.pending == 0) fail("more arrive at a barrier than it expects");
    b.pending--;
    b.settle();
    w.yields |= w.machine->random() & 1;  // for what the others do with it
}
static void arrive(Warp& w, const s64* o, int count, u32 lanes) {  // _, [address]
    if (count != 3) fail("an arrival of several");
    at_barriers<[](Warp& w, u32 address, int, const s64*) { arrive_at(w, address); }>(w, o, lanes, 1);
}
// What this thread copied by itself has to be there first: at once, if it has copied nothing.
static void arrive_after_copies(Warp& w, const s64* o, int, u32 lanes) {  // [address]
    at_barriers<[](Warp& w, u32 address, int i, const s64*) {
        auto& small = w.small[size_t(i)];
        if (small.empty()) return arrive_at(w, address);
        w.program->barrier(address);
        w.program->arrivals.push_back({address, std::move(small), bool(w.machine->random() & 1)});
        small.clear();
    }>(w, o, lanes, 0);
}
static void expect(Warp& w, const s64* o, int, u32 lanes) {  // _, [address], bytes
    at_barriers<[](Warp& w, u32 address, int i, const s64* o) {
        w.program->barrier(address).bytes += w.at(o[3])[i];
        arrive_at(w, address);
    }>(w, o, lanes, 1);
}
static void await(Warp& w, const s64* o, int, u32 lanes) {  // p, [address], parity
    u32 done = 0;
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1)
            done |= u32(w.program->barrier(w.at(o[1])[i] + u32(o[2])).phase != (w.at(o[3])[i] & 1)) << i;
    // a warp that has waited may fence what was copied for it
    for (int i = 0; i < 32; i++)
        if (done >> i & 1 && (i == 0 || w.at(o[1])[i] != w.at(o[1])[i - 1]))
            for (u32 number : w.program->barrier(w.at(o[1])[i] + u32(o[2])).copied[w.at(o[3])[i] & 1])
                w.written.push_back({number, w.program->words[number].changes});
    set_bits(w.at(o[0]), done, lanes);
    w.yields = w.polls = (done & lanes) != lanes;
}
