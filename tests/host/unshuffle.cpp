// unshuffle.cu whole: argv are the kernel (unshuffle, expand, fold), elements of the result, and the kernel's further arguments; the
// tensor comes by standard input as 32-bit words, and the result leaves so.
typedef unsigned u32;
typedef unsigned short u16;
#include "block.h"
#include <string>
#include "kernel.h"

static std::vector<Element> from, to;
static std::string name;
static long long more[6];

static void body() {
  int total = to.size();
  if (name == "unshuffle") unshuffle(from.data(), to.data(), total, more[0], more[1], more[2], more[3], more[4], more[5]);
  else (name == "expand" ? expand : fold)(from.data(), to.data(), total, more[0], more[1], more[2], more[3], more[4]);
}

int main(int argc, char** argv) {
  name = argv[1];
  to.assign(atoi(argv[2]), (Element)-1);
  for (int i = 3; i < argc; i++) more[i - 3] = atoll(argv[i]);
  for (Element v; fread(&v, sizeof v, 1, stdin) == 1;) from.push_back(v);
  run_grid((to.size() + THREADS - 1) / THREADS, THREADS, body);
  fwrite(to.data(), sizeof(Element), to.size(), stdout);
}
