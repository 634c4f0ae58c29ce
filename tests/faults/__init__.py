"""Faults on purpose: what fails, how soon the others know, and that training goes on."""
