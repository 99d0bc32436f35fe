// unshuffle.cu whole: argv are the kernel (unshuffle, both, fold), elements of the result, and the kernel's further arguments; the
// tensor comes by standard input as 32-bit words, and the result leaves so. `both` takes the weights, of which the arguments tell how
// many elements they have and become, before the tensor, and gives them first.
typedef unsigned u32;
typedef unsigned short u16;
#include "block.h"
#include "kernel.h"
typedef K::Element Element;

static std::vector<Element> from, to;
static std::string name;
static long long more[16];
static int given, expanded;                               // weights, of `both`

static void body() {
  int total = to.size() - expanded;
  if (name == "unshuffle") unshuffle<Config>(from.data(), to.data(), total, more[0], more[1], more[2], more[3], more[4], more[5]);
  else if (name == "fold") fold<Config>(from.data(), to.data(), total, more[0], more[1], more[2], more[3], more[4]);
  else
    unshuffle_and_expand<Config>(from.data(), to.data(), expanded, more[2], more[3], more[4], more[5], more[6], from.data() + given, to.data() + expanded,
                         total, more[7], more[8], more[9], more[10], more[11], more[12]);
}

int main(int argc, char** argv) {
  name = argv[1];
  to.assign(atoi(argv[2]), (Element)-1);
  for (int i = 3; i < argc; i++) more[i - 3] = atoll(argv[i]);
  if (name == "both") given = more[0], expanded = more[1];
  for (Element v; fread(&v, sizeof v, 1, stdin) == 1;) from.push_back(v);
  int blocks = (to.size() - expanded + THREADS - 1) / THREADS + (expanded + THREADS - 1) / THREADS;
  run_grid(blocks, THREADS, body);
  fwrite(to.data(), sizeof(Element), to.size(), stdout);
}
