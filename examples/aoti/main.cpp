// Decode with the package that export.py writes: without Python, and without tatten.
//
//     decode PACKAGE [NEW_TOKENS]

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <iostream>
#include <string>

constexpr int64_t first = 7;  // as in export.py

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::cerr << "usage: " << argv[0] << " PACKAGE [NEW_TOKENS]\n";
    return 2;
  }
  try {
    const int64_t new_tokens = argc == 3 ? std::stoll(argv[2]) : 16;
    c10::InferenceMode inference;
    torch::inductor::AOTIModelPackageLoader step(argv[1]);
    int64_t token = first;
    std::cout << token;
    for (int64_t position = 0; position < new_tokens; ++position) {
      // The cache is among the package's buffers, which each call writes to.
      const auto logits = step.run({torch::tensor({token}).unsqueeze(0), torch::tensor({position})}).at(0);
      token = logits.select(1, -1).argmax(-1).item<int64_t>();
      std::cout << ' ' << token << std::flush;
    }
    std::cout << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
