// Runs every native test; each file that has tests offers one function.
#include <cstdio>

void test_thread_pool();
void test_float16();
void test_linear();
void test_attention() __attribute__((weak));

int main() {
  test_float16();
  test_thread_pool();
  test_linear();
  if (test_attention) test_attention();
  std::puts("all native tests passed");
}
