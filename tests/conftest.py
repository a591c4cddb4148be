"""What holds for every test: one thread, so that sums do not depend on the machine, and no verdict by the clock."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
