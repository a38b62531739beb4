// The instructions of kernels/common/wgmma.cuh as the PTX ISA 9.2 describes them. A product is computed only when its warpgroup waits for
// it; its operand in shared memory must not have changed by then.
#pragma once
#include "common/ptx.cuh"

#define HAS_WGMMA (__CUDA_ARCH__ == 900)

constexpr int WARPGROUP = 4 * WARP;

#if HAS_WGMMA
struct GroupProduct {
    float (*c)[4];
    int tiles;
    double a[2][16];  // rows g and g + 8
    u64 b;
    std::vector<char> snapshot;
};
struct GroupProducts {
    std::deque<std::vector<GroupProduct>> groups;
    std::vector<GroupProduct> open;
};
inline GroupProducts group_products[8192];

inline void wgmma_fence() {}
inline void publish_shared() {}
template <int TILES>
void wgmma_fence_accumulators(float (&)[TILES][4]) {}
inline void wgmma_commit() {
    GroupProducts& p = group_products[Cluster::thread()];
    p.groups.push_back(std::move(p.open));
    p.open.clear();
}
template <int ALONG_K, int ALONG_N>
u64 wgmma_descriptor(u32 address) {
    if (address % 16) printf("an operand of a warpgroup at %u\n", address), exit(1);
    return (u64)(address >> 4) | (u64)(ALONG_K / 16) << 16 | (u64)(ALONG_N / 16) << 32;
}
// An element of B; its 8 by 8 matrices have the distances in the descriptor.
inline const char* group_element(u64 b, int k, int n) {
    auto distance = [&](int shift) { return (int)(b >> shift & 0x3fff) * 16; };
    return shared + distance(0) + k / 8 * distance(16) + n / 8 * distance(32) + n % 8 * 16 + k % 8 * 2;
}
template <int TILES>
void wgmma_f16(float (&c)[TILES][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    struct Lane {
        u32 a[4];
        u32 all[4][4];  // of the lanes with the same g
    };
    Lane mine = together<Lane>({{a0, a1, a2, a3}, {}}, [](Lane(&lanes)[WARP]) {
        for (int lane = 0; lane < WARP; lane++) {
            for (int t = 0; t < 4; t++) memcpy(lanes[lane].all[t], lanes[lane / 4 * 4 + t].a, 16);
        }
    });
    GroupProduct p = {c, TILES, {}, b, {}};
    for (int t = 0; t < 4; t++) {
        for (int word = 0; word < 4; word++) {
            double* to = &p.a[word % 2][2 * t + word / 2 * 8];
            to[0] = f16_low(mine.all[t][word]);
            to[1] = f16_high(mine.all[t][word]);
        }
    }
    for (int n = 0; n < TILES * 8; n++) {
        for (int k = 0; k < 16; k += 8) p.snapshot.insert(p.snapshot.end(), group_element(b, k, n), group_element(b, k, n) + 16);
    }
    group_products[Cluster::thread()].open.push_back(std::move(p));
}
template <int PENDING>
void wgmma_wait() {
    __syncwarp();
    GroupProducts& all = group_products[Cluster::thread()];
    for (; (int)all.groups.size() > PENDING; all.groups.pop_front()) {
        for (GroupProduct& p : all.groups.front()) {
            for (int n = 0; n < p.tiles * 8; n++) {
                for (int k = 0; k < 16; k += 8) {
                    if (memcmp(group_element(p.b, k, n), &p.snapshot[(n * 2 + k / 8) * 16], 16)) printf("an operand was overwritten\n"), exit(1);
                }
            }
            for (int i = 0; i < p.tiles; i++) {
                for (int e = 0; e < 4; e++) {
                    int n = 8 * i + lane_id() % 4 * 2 + e % 2;
                    double sum = p.c[i][e];
                    for (int k = 0; k < 16; k++) {
                        u16 x;
                        memcpy(&x, group_element(p.b, k, n), 2);
                        sum += p.a[e / 2][k] * f16_to_float(x);
                    }
                    p.c[i][e] = (float)sum;
                }
            }
        }
    }
    // The warp waits as one.
    __syncwarp();
}
#endif
