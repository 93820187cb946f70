// The part of OpenMP that the kernels use, on plain threads: ThreadSanitizer does not see how libgomp synchronizes, and
// would report its every barrier. Linked by scripts/sanitize.py in the place of libgomp.
#include <pthread.h>

#include <thread>
#include <vector>

namespace {

struct Team {
  explicit Team(unsigned count) : size(int(count)) { pthread_barrier_init(&barrier, nullptr, count); }
  ~Team() { pthread_barrier_destroy(&barrier); }
  int size;
  pthread_barrier_t barrier;
};

thread_local Team* team = nullptr;
thread_local int member = 0;

}  // namespace

#define HERE extern "C" __attribute__((visibility("hidden")))

HERE void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  Team mine(threads > 0 ? threads : 1);
  const auto work = [&](int number) {
    team = &mine;
    member = number;
    body(data);
  };
  std::vector<std::thread> others;
  for (int number = 1; number < mine.size; ++number) others.emplace_back(work, number);
  work(0);
  for (std::thread& other : others) other.join();
  team = nullptr;
  member = 0;
}

HERE void GOMP_barrier() {
  if (team != nullptr) pthread_barrier_wait(&team->barrier);
}

HERE int omp_get_thread_num() { return member; }
HERE int omp_get_num_threads() { return team != nullptr ? team->size : 1; }
