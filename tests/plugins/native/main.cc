// Runs every native test; each file that has tests offers one function.
#include <cstdio>

void test_thread_pool();
void test_float16();
void test_linear();
void test_attention();

int main() {
  test_float16();
  test_thread_pool();
  test_linear();
  test_attention();
  std::puts("all native tests passed");
}
