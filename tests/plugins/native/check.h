// A check that ends the test with the place and a message.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

inline std::string check_text() { return ""; }

__attribute__((format(printf, 1, 2))) inline std::string check_text(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

#define CHECK(condition, ...)                                                                                   \
  do {                                                                                                          \
    if (!(condition)) {                                                                                         \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, check_text(__VA_ARGS__).c_str()); \
      std::exit(1);                                                                                             \
    }                                                                                                           \
  } while (false)
