// Tiles of TILE_D x TILE_H x TILE_W places of an image, one behind the other along W first.
struct Sizes {
  int out_d, out_h, out_w;                              // of the result
  int tiles_d, tiles_h, tiles_w, tiles;
};

struct Tile { int n, d, h, w; };                        // image and first place

__device__ __forceinline__ Tile tile_at(int q, const Sizes& s) {
  Tile t;
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * TILE_D;
  t.n = q / s.tiles_d;
  return t;
}
