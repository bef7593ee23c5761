/*
 * A task of a step, on its node, as its user, just before it becomes the user's command.
 *
 * Where srun left the agents' orders in the step's environment, the node's agent goes before the command:
 * `everstep agent --task -- COMMAND`. Every other task is left as it is.
 */
#include "everstep.h"

#include <errno.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *find(char **env, const char *name)
{
	size_t length = strlen(name);

	for (; env && *env; env++)
		if (strncmp(*env, name, length) == 0 && (*env)[length] == '=')
			return *env + length + 1;
	return NULL;
}

static int become_agent(spank_t spank, const char *everstep, char **env)
{
	const char *before[] = { everstep, "agent", "--task", "--" };
	const int count = sizeof(before) / sizeof(before[0]);

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 11, 0)
	(void)env;
	return spank_prepend_task_argv(spank, count, before) == ESPANK_SUCCESS ? 0 : -1;
#else
	/* Older releases can only have the agent take over here: TaskProlog and plugins further down do not run. */
	char **argv = NULL, **words = NULL;
	int argc = 0;

	if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1)
		return -1;
	if (!(words = calloc((size_t)(argc + count) + 1, sizeof(*words))))
		return -1;
	memcpy(words, before, sizeof(before));
	memcpy(words + count, argv, (size_t)argc * sizeof(*argv));
	execve(everstep, words, env);
	free(words);
	return -1;
#endif
}

int remote_task(void *spank)
{
	const char *everstep = NULL, *report = NULL, *node = NULL;
	char **env = NULL;

	if (spank_get_item(spank, S_JOB_ENV, &env) != ESPANK_SUCCESS || !find(env, VAR_ORDERS))
		return 0;
	everstep = find(env, VAR_PATH);
	node = find(env, "SLURMD_NODENAME");
	if (everstep && process_executable(everstep) && become_agent(spank, everstep, env) == 0)
		return 0;
	slurm_error("everstep: %s cannot be started on %s (%s): install it there as on the other nodes",
		    everstep ? everstep : "everstep", node ? node : "this node", strerror(errno));
	if ((report = find(env, VAR_REPORT)))
		ear_tell(report, EXIT_USAGE);
	return -1;
}
