"""The present readings of devices, processes and the host, from NVML and the system."""
