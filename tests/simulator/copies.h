// The copy engine: boxes of a tensor into shared memory.
#pragma once

#include <cstring>

#include "barriers.h"

// All at once; nothing outside of the tensor is read, and what lies there is 0.
static void complete(Machine& machine, Program& program, const Copy& copy) {
    const Box& box = copy.box;
    std::array<s32, 5> at{};
    u32 row = u32(box.box[0] * box.element), offset = 0;
    if (row % 16) fail("a box of rows that are not whole words");
    std::vector<u8> bytes(row);
    for (bool more = true; more;) {
        std::fill(bytes.begin(), bytes.end(), 0);
        bool inside = true;
        s64 place = 0;
        for (int d = 1; d < box.rank; d++) {
            s64 x = s64(copy.at[d]) + at[d];
            inside &= x >= 0 && x < box.sizes[d];
            place += x * box.strides[d];
        }
        s64 from = std::max<s64>(copy.at[0], 0), to = std::min<s64>(s64(copy.at[0]) + box.box[0], box.sizes[0]);
        if (inside && from < to) {
            u64 address = box.base + place + from * box.element;
            machine.check(address, (to - from) * box.element);
            const void* source = reinterpret_cast<void*>(address);
            std::memcpy(bytes.data() + (from - copy.at[0]) * box.element, source, (to - from) * box.element);
        }
        for (u32 i = 0; i < row; i += 16)
            std::memcpy(program.to_copy(swizzled(copy.target + offset + i, box.swizzle), 16), bytes.data() + i, 16);
        offset += row;
        more = false;
        for (int d = 1; d < box.rank && !more; d++) {
            more = ++at[d] < box.box[d];
            if (!more) at[d] = 0;
        }
    }
    Barrier& b = program.barrier(copy.barrier);
    b.bytes -= offset;
    b.settle();
    machine.events++;
}

// Of a thread: not there before the barrier that hears of it, and no tensor core may read it without a fence.
static void copy_small(Warp& w, const s64* o, int count, u32 lanes) {  // [target], [source], 16, bytes that are read
    if (count < 5) fail("a copy of a thread in another form");
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            if (w.at(o[4])[i] != 16) fail("a copy of a thread of other than 16 bytes");
            u32 bytes = count > 5 ? w.at(o[5])[i] : 16, target = w.at(o[0])[i] + u32(o[1]);
            u64 source = wide(w.at(o[2]), i) + u64(o[3]);
            if (bytes != 0 && bytes != 16) fail("a copy of a thread of a part of 16 bytes");
            if (bytes) w.machine->check(source, 16);
            w.program->memory(target, 16);
            w.small[size_t(i)].push_back({target, source, bytes});
        }
}

static void complete(Machine& machine, Program& program, const Arrival& arrival) {
    Barrier& b = program.barrier(arrival.barrier);
    for (const Small& copy : arrival.copies) {
        u8* found = program.memory(copy.target, 16);
        program.check_barriers(copy.target, 16);
        u32 number = (copy.target - SHARED_BASE) / 16;
        std::memset(found, 0, 16);
        if (copy.bytes) std::memcpy(found, reinterpret_cast<void*>(copy.source), 16);
        program.words[number].changes++, program.words[number].unfenced = true;
        b.copied[b.phase].push_back(number);
    }
    if (b.pending == 0) fail("more arrive at a barrier than it expects");
    b.pending--;
    b.settle();
    machine.events++;
}

static void prefetch(Warp& w, const s64* o, int, u32 lanes) {  // [address], size: nothing comes, but it has to be there
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            u64 address = wide(w.at(o[0]), i) + u64(o[1]), size = w.at(o[2])[i];
            if (address % 16 || size % 16) fail("a prefetch in other steps than of 16 bytes");
            w.machine->check(address, size);
        }
}

static void prefetch_line(Warp& w, const s64* o, int, u32 lanes) {  // [address]
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) w.machine->check(wide(w.at(o[0]), i) + u64(o[1]), 1);
}

static void copy_box(Warp& w, const s64* o, int count, u32 lanes) {  // [target], [box, {coordinates}], [barrier]
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) {
            Copy copy{};
            copy.target = w.at(o[0])[i] + u32(o[1]);
            u64 box = wide(w.at(o[2]), i) + u64(o[3]) - w.machine->parameters;
            if (box > MOST_PARAMETERS - sizeof(Box)) fail("no descriptor is there");
            std::memcpy(&copy.box, reinterpret_cast<void*>(w.machine->parameters + box), sizeof(Box));
            if (copy.box.rank != count - 6) fail("a descriptor of another rank");
            if (copy.target % 128) fail("boxes lie at multiples of 128 bytes");
            for (int d = 0; d < copy.box.rank; d++) copy.at[d] = s32(w.at(o[4 + d])[i]);
            copy.late = w.machine->random() & 1;
            copy.barrier = w.at(o[count - 2])[i] + u32(o[count - 1]);
            if (w.machine->random() & 1) complete(*w.machine, *w.program, copy);
            else w.program->copies.push_back(copy);
        }
}
