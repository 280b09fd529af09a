// Atomics on global and shared memory. Each returns the old value, relaxed, as in CUDA.
//
// They are functions of the device library rather than inline code: the compiler cannot merge or move
// them, and there is one place where every atomic passes.
#pragma once

#include <cstdint>

int atomicAdd(int* address, int value);
unsigned atomicAdd(unsigned* address, unsigned value);
unsigned long long atomicAdd(unsigned long long* address, unsigned long long value);
float atomicAdd(float* address, float value);
double atomicAdd(double* address, double value);

int atomicSub(int* address, int value);
unsigned atomicSub(unsigned* address, unsigned value);

int atomicExch(int* address, int value);
unsigned atomicExch(unsigned* address, unsigned value);
unsigned long long atomicExch(unsigned long long* address, unsigned long long value);
float atomicExch(float* address, float value);

int atomicMin(int* address, int value);
unsigned atomicMin(unsigned* address, unsigned value);
int atomicMax(int* address, int value);
unsigned atomicMax(unsigned* address, unsigned value);

unsigned atomicInc(unsigned* address, unsigned limit);
unsigned atomicDec(unsigned* address, unsigned limit);

int atomicCAS(int* address, int expected, int desired);
unsigned atomicCAS(unsigned* address, unsigned expected, unsigned desired);
unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                             unsigned long long desired);
unsigned short atomicCAS(unsigned short* address, unsigned short expected, unsigned short desired);

int atomicAnd(int* address, int value);
unsigned atomicAnd(unsigned* address, unsigned value);
int atomicOr(int* address, int value);
unsigned atomicOr(unsigned* address, unsigned value);
int atomicXor(int* address, int value);
unsigned atomicXor(unsigned* address, unsigned value);
