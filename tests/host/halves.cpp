// wgrad_handover.cuh's order: of each unit both blocks together take every chunk of K once, and blocks have every tile once.
#include "standard.h"

#define __device__
#define __forceinline__ inline

#include "kernel.h"  // CI_TILES, CO_TILES, and the order, cut from the kernel by test_host.py

[[noreturn]] static void fail(const char* what, int of) {
  printf("%s: %d\n", what, of);
  fflush(stdout);
  _Exit(1);
}

int main() {
  for (int chunks = 1; chunks <= 70; chunks++) {
    std::vector<int> of_unit[2] = {std::vector<int>(chunks), std::vector<int>(chunks)};
    for (int rank = 0; rank < 2; rank++) {
      const WgradHalves halves(chunks, rank);
      if (halves.handed < 1 || halves.count() * 2 != chunks + halves.handed) fail("blocks with other shares", chunks);
      for (int i = 0; i < halves.count(); i++) {
        const int chunk = halves.chunk(i);
        if (chunk < 0 || chunk >= chunks) fail("a chunk that is none", chunks);
        of_unit[rank][chunk]++;
        if (i < halves.whole) of_unit[1 - rank][chunk]++;
      }
    }
    for (auto& unit : of_unit)
      for (int times : unit)
        if (times != 1) fail("a chunk that is not taken once", chunks);
  }
  std::vector<int> tiles(CI_TILES * CO_TILES);
  for (int i = 0; i < CI_TILES * CO_TILES; i++) {
    int ci, co;
    wgrad_tile_of<CI_TILES, CO_TILES>(i, ci, co);
    if (ci < 0 || ci >= CI_TILES || co < 0 || co >= CO_TILES || tiles[ci * CO_TILES + co]++) fail("a tile that is not taken once", i);
    int next_ci, next_co;
    wgrad_tile_of<CI_TILES, CO_TILES>(i ^ 1, next_ci, next_co);
    if (CI_TILES % 2 == 0 && next_co != co) fail("neighbours with other pixels of g", i);
  }
  printf("%d\n", CI_TILES * CO_TILES);
}
