"""What devices, processes and the host do now, as NVML and the system tell it."""
