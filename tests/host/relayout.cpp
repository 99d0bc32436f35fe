// relayout.cu whole: argv are 0 (to channels_last), 1 (back) or 2 (wider pixels), blocks, channels, pixels, by how many elements the
// narrow or contiguous tensor begins off 16 bytes, or -1: it ends with the memory that may be read, and the channels of a copy's pixel;
// the tensor comes by standard input, its copy leaves so.
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#include "block.h"

struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#include "kernel.h"
typedef K::Element Element;

static Element *from, *to;
static int channels, pixels, width;

int main(int argc, char** argv) {
  int mode = atoi(argv[1]);
  bool back = mode == 1;
  int blocks = atoi(argv[2]), offset = atoi(argv[5]);
  channels = atoi(argv[3]);
  pixels = atoi(argv[4]);
  width = atoi(argv[6]);
  std::vector<Element> given;
  for (Element v; fread(&v, sizeof v, 1, stdin) == 1;) given.push_back(v);
  size_t count = given.size() / channels * width;       // of the copy
  std::vector<Element> memory[2];
  Element* at[2];
  for (int i = 0; i < 2; i++) {
    memory[i].assign((i ? count : given.size()) + 128, (Element)-1);
    at[i] = (Element*)(((size_t)(memory[i].data() + 16) + 15) / 16 * 16) + (i == (int)back && offset > 0 ? offset : 0);
  }
  from = at[0];
  to = at[1];
  if (offset < 0) {                                      // the contiguous tensor ends at a page that traps
    size_t bytes = given.size() * sizeof(Element), page = 4096, whole = (bytes + page - 1) / page * page;
    char* pages = (char*)mmap(0, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages + whole, page, PROT_NONE);
    (back ? to : from) = (Element*)(pages + whole - bytes);
  }
  memcpy((void*)from, given.data(), given.size() * sizeof(Element));
  if (back) run_grid(blocks, THREADS, [] { to_contiguous<Config>(from, to, channels, pixels); });
  else if (mode == 2) run_grid(blocks, THREADS, [] { widen<Config>(from, to, channels, pixels, width); });
  else run_grid(blocks, THREADS, [] { to_channels_last<Config>(from, to, channels, pixels, width); });
  for (Element* p = memory[1].data(); p < &memory[1].back() && !(back && offset < 0); p++)
    if ((p < to || p >= to + count) && *p != (Element)-1) fail("an element beside the copy was written");
  fwrite(to, sizeof(Element), count, stdout);
}
