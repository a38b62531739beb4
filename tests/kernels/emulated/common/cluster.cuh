// The instructions of kernels/common/cluster.cuh as the PTX ISA 9.2 describes them. A copy happens some time after it was requested.
#pragma once
#include <map>
#include <utility>

#include "common/ptx.cuh"

struct CountedBarrier {
    int arrivals, missing;
    long long bytes = 0;
    uint64_t phases = 0;
    void check() {
        if (missing > 0 || bytes != 0) return;
        missing = arrivals;
        phases++;
    }
};
// By block and address.
inline std::map<std::pair<int, u32>, CountedBarrier> counted;
inline CountedBarrier& counted_at(u32 barrier, int block = Cluster::rank) {
    auto found = counted.find({block, barrier});
    if (found == counted.end()) printf("no barrier at %u\n", barrier), exit(1);
    return found->second;
}

inline void barrier_init(u32 barrier, u32 arrivals) {
    if (barrier % 8) printf("a barrier at %u\n", barrier), exit(1);
    counted[{Cluster::rank, barrier}] = {(int)arrivals, (int)arrivals};
}
inline void publish_barriers() {}
inline void show_to_copies() {}
inline void barrier_arrive(u32 barrier) {
    CountedBarrier& b = counted_at(barrier);
    if (b.missing-- == 0) printf("one too many at a barrier\n"), exit(1);
    b.check();
}
inline void barrier_expect(u32 barrier, u32 bytes) {
    counted_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 phase) {
    CountedBarrier& b = counted_at(barrier);
    while (b.phases % 2 == phase) Cluster::wait(b.phases);
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) printf("a copy of %u bytes from %p to %u\n", bytes, from, to), exit(1);
    int block = Cluster::rank;
    CountedBarrier& b = counted_at(barrier);
    Cluster::current->later.push_back([=, &b] {
        memcpy(Cluster::current->memory(block) + to, from, bytes);
        b.bytes -= bytes;
        b.check();
    });
}

inline void cluster_sync() { Cluster::wait(Cluster::current->all, (int)Cluster::current->fibers.size()); }
inline float4 load_cluster_16(u32 address, u32 block) {
    if (address % 16) printf("16 bytes of a cluster's shared memory at %u\n", address), exit(1);
    float4 v;
    memcpy(&v, Cluster::current->memory((int)block) + address, sizeof v);
    return v;
}
inline void store_cluster(u32 to, u32 block, float x) {
    if (to % 4) printf("4 bytes to a cluster's shared memory at %u\n", to), exit(1);
    memcpy(Cluster::current->memory((int)block) + to, &x, sizeof x);
}
inline void send_to_cluster(u32 to, u32 block, float x, u32 barrier) {
    if (to % 4) printf("4 bytes to a cluster's shared memory at %u\n", to), exit(1);
    CountedBarrier& b = counted_at(barrier, (int)block);
    Cluster::current->later.push_back([=, &b] {
        memcpy(Cluster::current->memory((int)block) + to, &x, sizeof x);
        b.bytes -= sizeof x;
        b.check();
    });
}

inline void cluster_arrive() {
    Cluster::Barrier& all = Cluster::current->all;
    Cluster::current->fiber().arrived = all.passed;
    Cluster::arrive(all, (int)Cluster::current->fibers.size());
}
// After cluster_arrive().
inline void cluster_wait() {
    uint64_t& passed = Cluster::current->all.passed;
    while (passed == Cluster::current->fiber().arrived) Cluster::wait(passed);
}
