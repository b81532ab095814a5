// A Hopper GPU as PTX describes it.
//
// All programs (CTAs) live at once, and their warps run in turns of random length.  What is asynchronous on the GPU
// happens at a random time here, at once or as late as it may: whoever does not wait for it reads what was there
// before, whoever reuses memory too early overwrites it, and what a product reads must not change until it was waited
// for.  What is not modelled stands in docs/testing.md.

#include <cstring>
#include <map>

#include "instructions.h"

// where a warp goes next is for `step`
static void branch(Warp&, const s64*, int, u32) {}
static void branch_by_index(Warp&, const s64*, int, u32) {}
static void leave(Warp&, const s64*, int, u32) {}

// These lanes are there now, with others that may be.
static void go(Warp& w, size_t part, int to) {
    w.parts[part].at = to;
    for (size_t i = 0; w.parts.size() > 1 && i < w.parts.size(); i++)
        if (i != part && w.parts[i].at == to) {
            w.parts[i].lanes |= w.parts[part].lanes;
            w.parts.erase(w.parts.begin() + s64(part));
            return;
        }
}

// Of the lanes of a part these go there, the others on.
static void divide(Warp& w, size_t part, u32 lanes, int to) {
    auto [at, all] = w.parts[part];
    if (lanes == all) return go(w, part, to);
    if (lanes) {
        w.parts.push_back({-1, lanes});
        w.parts[part].lanes = all & ~lanes;
        go(w, w.parts.size() - 1, to);
    }
    go(w, part, at + 1);
}

// The lanes that are farthest behind, but for those that have to wait for the others.
static size_t next(Machine& machine, Warp& w) {
    if (w.parts.size() == 1) return 0;
    size_t found = w.parts.size();
    for (size_t i = 0; i < w.parts.size(); i++)
        if (!machine.together[size_t(machine.ops[size_t(w.parts[i].at)].name)])
            if (found == w.parts.size() || w.parts[i].at < w.parts[found].at) found = i;
    if (found == w.parts.size()) fail("lanes of a warp wait for each other at different places");
    return found;
}

// One instruction.
static void step(Machine& machine, Warp& w, int& where) {
    size_t part = next(machine, w);
    auto [at, all] = w.parts[part];
    where = at;
    const Op& op = machine.ops[size_t(at)];
    const s64* o = machine.operands.data() + op.first;
    Run run = machine.runs[size_t(op.name)];
    u32 lanes = all;
    if (op.guard > 0) lanes &= *w.at(op.guard - 1);
    if (op.guard < 0) lanes &= ~*w.at(-op.guard - 1);
    if (run == branch) return divide(w, part, lanes, int(o[0]));
    if (run == branch_by_index) {
        if (lanes != all) fail("some lanes of a warp go by a table of branches");
        u32 index = w.at(o[0])[std::countr_zero(lanes)];
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1 && w.at(o[0])[i] != index) fail("a warp divides at a table of branches");
        if (int(index) + 1 >= op.count) fail("a table of branches ends before");
        return go(w, part, int(o[1 + index]));
    }
    if (run == leave) {
        if (lanes != all) fail("some lanes of a warp leave");
        w.parts.erase(w.parts.begin() + s64(part));
        machine.events++;
        return;
    }
    if (lanes && lanes != ALL && machine.together[size_t(op.name)]) fail("some lanes of a warp do what takes all");
    if (lanes) run(w, o, op.count, lanes);
    go(w, part, at + 1);
}

struct Launch {  // as the caller passes it
    const char* names;  // of instructions, a line each
    const s64* ops;     // (name, guard, first operand, operands) each
    s64 num_ops;
    const s64* operands;
    s64 num_operands;
    const s64* constants;  // (place, value) each
    s64 num_constants;
    s64 words;     // of registers of a warp
    s64 specials;  // where thread, program, programs, lane and bytes of shared memory lie
    s64 threads, programs, shared;
    u64 parameters;     // their address
    const u64* memory;  // (from, to) each
    s64 num_memory;
    const u64* traces;  // words of which a program must leave none in shared memory
    s64 num_traces;
    u64 seed;
    s64 most;  // instructions of warps, in all
};

static void read(const Launch& launch, Machine& machine) {
    static const auto known = [] {
        auto all = all_instructions();
        all["bra"] = all["bra.uni"] = branch, all["brx.idx"] = branch_by_index, all["ret"] = all["exit"] = leave;
        return all;
    }();
    std::string names(launch.names), missing;
    for (size_t from = 0, to; from < names.size(); from = to + 1) {
        to = names.find('\n', from);
        std::string name = names.substr(from, to - from);
        auto found = known.find(name);
        if (found == known.end()) missing += " " + name;
        machine.runs.push_back(found == known.end() ? trap : found->second);
        machine.together.push_back(name.find(".sync") != std::string::npos);
    }
    if (!missing.empty()) fail("instructions that are not known:" + missing);
    for (s64 i = 0; i < launch.num_ops; i++) {
        const s64* o = launch.ops + 4 * i;
        machine.ops.push_back({int(o[0]), o[1], int(o[2]), int(o[3])});
    }
    machine.operands.assign(launch.operands, launch.operands + launch.num_operands);
    for (s64 i = 0; i < launch.num_memory; i++) machine.memory.push_back({launch.memory[2 * i], launch.memory[2 * i + 1]});
    machine.random.seed(launch.seed);
    machine.left = launch.most;
    machine.parameters = launch.parameters;
}

static std::unique_ptr<Program> start(const Launch& launch, Machine& machine, int number) {
    auto program = std::make_unique<Program>(number, size_t(launch.shared));
    for (int n = 0; n < launch.threads / 32; n++) {
        auto w = std::make_unique<Warp>();
        w->machine = &machine, w->program = program.get(), w->number = n;
        w->words.resize(size_t(launch.words), UNWRITTEN);
        for (int lane = 0; lane < 32; lane++) {
            for (s64 i = 0; i < launch.num_constants; i++)
                put<s64>(w->at(launch.constants[2 * i]), lane, launch.constants[2 * i + 1]);
            u32* special = w->at(launch.specials);
            for (s64 x : {s64(32 * n + lane), s64(number), launch.programs, s64(lane), launch.shared})
                special[lane] = u32(x), special += 64;
        }
        program->warps.push_back(std::move(w));
    }
    return program;
}

// Some instructions of a warp, until it has to wait.
static void take_turn(Machine& machine, Warp& w, int& at) {
    w.yields = false;
    for (int left = 1 << machine.random() % 10; left && !w.yields && !w.waits && !w.parts.empty(); left--) {
        if (!machine.left--) fail("too many instructions: it may never end");
        try {
            step(machine, w, at);
        } catch (const std::runtime_error& error) {
            std::string who = "program " + std::to_string(w.program->number) + ", warp " + std::to_string(w.number);
            fail(std::string(error.what()) + " (" + who + ")");
        }
    }
}

// The threads whose own copies are there now.
static void deliver_arrivals(Machine& machine, Program& program, bool late) {
    auto& all = program.arrivals;
    for (size_t left = all.size(); left--;) {  // a warp's come one by one
        auto found = all.begin() + s64(machine.random() % all.size());
        if ((found->late && !late) || (!late && machine.random() & 1)) continue;
        Arrival arrival = std::move(*found);
        all.erase(found);
        complete(machine, program, arrival);
    }
}

// One of the copies under way, if there is one for now.
static void deliver(Machine& machine, Program& program, bool late) {
    deliver_arrivals(machine, program, late);
    auto& copies = program.copies;
    if (copies.empty()) return;
    auto found = copies.begin() + s64(machine.random() % copies.size());
    if (found->late && !late) return;
    Copy copy = *found;
    copies.erase(found);
    complete(machine, program, copy);
}

[[noreturn]] static void fail_for_ever(const std::vector<Warp*>& warps) {
    std::map<int, int> places;
    for (Warp* w : warps) places[w->parts[0].at]++;
    std::string where;
    for (auto& [at, count] : places) where += "\n  " + std::to_string(count) + " warps at @" + std::to_string(at);
    fail("all wait for ever:" + where);
}

static void run(const Launch& launch, int& at) {
    Machine machine;
    read(launch, machine);
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Warp*> warps;
    for (int i = 0; i < launch.programs; i++) {
        programs.push_back(start(launch, machine, i));
        for (auto& w : programs.back()->warps) warps.push_back(w.get());
    }
    for (int idle = 0; !warps.empty();) {
        s64 before = machine.events;
        bool ran = false;
        std::shuffle(warps.begin(), warps.end(), machine.random);
        for (Warp* w : warps) {
            take_turn(machine, *w, at);
            ran |= !w->polls && !w->waits;
        }
        at = -1;
        std::erase_if(warps, [](Warp* w) { return w->parts.empty(); });
        bool stuck = machine.events == before && !ran;
        for (auto& program : programs)
            if (stuck || machine.random() % 4 == 0) deliver(machine, *program, stuck);
        idle = stuck && machine.events == before ? idle + 1 : 0;
        if (idle > 3) fail_for_ever(warps);
    }
    for (auto& program : programs) {
        if (!program->copies.empty() || !program->arrivals.empty()) fail("a program ended before what it copies was there");
        for (size_t byte = 0; byte + 8 <= program->shared.size(); byte += 8) {
            u64 word;
            std::memcpy(&word, &program->shared[byte], 8);
            if (std::count(launch.traces, launch.traces + launch.num_traces, word))
                fail("a program leaves in shared memory what the next one there may look for");
        }
    }
}

// 0, or -1 with what went wrong, and at which instruction if it was at one.
extern "C" int simulate(const Launch* launch, char* message, s64 room, s64* where) {
    int at = -1;
    try {
        run(*launch, at);
        return 0;
    } catch (const std::exception& error) {
        std::strncpy(message, error.what(), size_t(room - 1));
        *where = at;
        return -1;
    }
}
