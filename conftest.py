"""What must hold before torch is imported, in every test. pytest reads this file before any other conftest.py; with
`--device virtual`, it takes the word for the folder virtual/ and reads that folder's conftest.py before the one in
tests/."""

import os

# One thread for each operator: models are tiny here, and threads would cost more than they give. It is set by the
# environment, before torch is imported, since `torch.set_num_threads` does not reach MKL in another thread before the
# first parallel loop there. A matrix product on two threads may differ from one on one thread in the last bits, so
# that runs in two processes could not be compared exactly.
os.environ["OMP_NUM_THREADS"] = "1"
