// What programs here include of the standard library; the tests compile it once, ahead of them all.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>
