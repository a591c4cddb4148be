"""What holds for every test: one thread, so that sums do not depend on the machine and cores are not fought over."""

import torch

torch.set_num_threads(1)
