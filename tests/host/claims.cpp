// claims.cuh by threads of the host: blocks, each of a thread that loads and claims and of some that read, ahead of and behind each
// other by as much as stages allow; two of these take turns, so that one may be a tile behind what the other has given back. All tiles
// must be taken, each by one block, whose threads see the same in the same order.
#include "standard.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#define __device__
#define __forceinline__ inline
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  fflush(stdout);
  _Exit(1);
}

struct Dim { u32 x; };
static thread_local Dim blockIdx, gridDim;
static const int READERS = 3;
struct Block {
  std::atomic<u32> completed[64], words[64];  // phases of barriers; the ring's words
  std::atomic<long long> issued, consumed[READERS], turn;
  std::vector<int> seen[READERS + 1];         // the last: the claiming thread's
};
static thread_local Block* block;

static void barrier_init(u32 barrier, int count) {
  if (count != 1) fail("one thread arrives at a place");
  block->completed[barrier / 8] = 0;
}
static void barrier_arrive(u32 barrier) { block->completed[barrier / 8]++; }
static void barrier_wait(u32 barrier, u32 parity) {
  while ((block->completed[barrier / 8] & 1) == parity) std::this_thread::yield();
}
static void store_shared_u32(u32 address, u32 value) { block->words[address / 4] = value; }
static u32 load_shared_u32(u32 address) { return block->words[address / 4]; }
static std::atomic<int> added;
static u32 atomicAdd(u32* at, u32 by) {
  added++;
  return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);
}
static u32 __shfl_sync(u32, u32 v, int) { return v; }

#define HAS_BLOCKS
#include "kernel.h"  // Config's stages, step and last_rounds, and claims.cuh
static const int STAGES = Config::stages, CLAIM_STEP = Config::step, LAST_ROUNDS = Config::last_rounds;

static void pause(std::mt19937& random) {
  for (int i = random() % 4 ? 0 : random() % 20; i > 0; i--) std::this_thread::yield();
}

static void load(u32* counters, int tiles, int chunks, u32 seed) {
  std::mt19937 random(seed);
  Claimer<CLAIM_STEP, LAST_ROUNDS> claimer(0, counters, tiles);
  for (int index = blockIdx.x; index < tiles; index = claimer.next()) {
    block->seen[READERS].push_back(index);
    for (int chunk = 0; chunk < chunks; chunk++) {
      for (int r = 0; r < READERS; r++)
        while (block->issued - block->consumed[r] >= STAGES) std::this_thread::yield();
      block->issued++;
      claimer.tell();
      pause(random);
    }
  }
  claimer.end();
}

static void read(int tiles, int chunks, int reader, u32 seed) {
  std::mt19937 random(seed);
  ClaimsOf<true> reading(0);
  for (int index = blockIdx.x; index < tiles; index = reading.next()) {
    block->seen[reader].push_back(index);
    // Readers 0 and 1 take turns: a tile's chunks are given back by the one whose it is, for both, as soon as the other has done its.
    const long long turn = block->seen[reader].size() - 1;
    if (reader < 2 && turn % 2 != reader) continue;
    if (reader < 2)
      while (block->turn != turn) std::this_thread::yield();
    for (int chunk = 0; chunk < chunks; chunk++) {
      while (block->issued <= block->consumed[reader]) std::this_thread::yield();
      pause(random);
      if (reader < 2) block->consumed[0]++, block->consumed[1]++;
      else block->consumed[reader]++;
    }
    if (reader < 2) block->turn++;
    for (int i = random() % 60; i > 0; i--) std::this_thread::yield();  // it stores
  }
}

static void launch(u32* counters, int grid, int tiles, int chunks, std::mt19937& random) {
  added = 0;
  std::vector<Block> blocks(grid);
  std::vector<std::thread> threads;
  for (int b = 0; b < grid; b++) {
    block = &blocks[b];
    claims_init(0);
    for (int r = 0; r <= READERS; r++) {
      u32 seed = random();
      threads.emplace_back([=, &blocks] {
        block = &blocks[b], blockIdx.x = b, gridDim.x = grid;
        if (r == READERS) load(counters, tiles, chunks, seed);
        else read(tiles, chunks, r, seed);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int> all;
  for (int b = 0; b < grid; b++) {
    for (int r = 0; r < READERS; r++)
      if (blocks[b].seen[r] != blocks[b].seen[READERS]) fail("a thread saw other tiles than its block's were");
    for (int tile : blocks[b].seen[READERS]) {
      if (tile % CLAIM_STEP != b % CLAIM_STEP) fail("a tile of another remainder");
      if ((!counters || (LAST_ROUNDS && tile < (tiles / grid - LAST_ROUNDS) * grid)) && tile % grid != b) fail("a tile that was dealt to another block");
      all.push_back(tile);
    }
  }
  // Each block adds once for what is beyond the last tile, and once more as it ends.
  const int even = LAST_ROUNDS && tiles / grid > LAST_ROUNDS ? (tiles / grid - LAST_ROUNDS) * grid : grid;
  if (added != (counters ? tiles - even + 2 * grid : 0)) fail("not as many claims as tiles that are not dealt out");
  std::sort(all.begin(), all.end());
  if ((int)all.size() != tiles) fail("not as many tiles as there are");
  for (int i = 0; i < tiles; i++)
    if (all[i] != i) fail("a tile was taken twice");
}

int main(int, char** argv) {
  std::mt19937 random(atoi(argv[1]));
  std::vector<u32> counters(CLAIM_STEP + 1);
  long long taken = 0;
  for (int i = 0; i < atoi(argv[2]); i++) {
    const int grid = CLAIM_STEP * (1 + random() % 3), tiles = grid + random() % 150, chunks = 1 + random() % 3;
    launch(i % 4 == 3 ? nullptr : counters.data(), grid, tiles, chunks, random);
    for (u32 left : counters)
      if (left) fail("counters that are no zeros behind the last block");
    taken += tiles;
  }
  printf("%lld\n", taken);
}
