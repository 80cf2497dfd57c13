// The emulator's settings, for Python.
#include "emulator/block.h"

extern "C" __attribute__((visibility("default"))) void quest_emulator_configure(int order, unsigned seed) {
  emulator::config = {static_cast<emulator::Order>(order), seed};
}
