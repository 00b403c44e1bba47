/* How the threads of a program wait for each other. */
#ifndef PS_SRC_PASSIVE_H
#define PS_SRC_PASSIVE_H

/* At the start of main. OpenMP's threads then sleep while they wait, as fast on idle cores and several times faster on cores that
 * others use too, unless the environment has OMP_WAIT_POLICY or GOMP_SPINCOUNT, or --device asks for CUDA. */
void ps_wait_passively(char **argv);

#endif
