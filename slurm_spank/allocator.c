/*
 * sbatch and salloc: --auto-resume makes a job that outlives its nodes, as --no-kill does.
 *
 * Slurm's parser has read the options (also those on #SBATCH lines) before we know, so the command takes its own place
 * once more, with SBATCH_NO_KILL or SALLOC_NO_KILL in its environment. Those of the user win over that. The options
 * themselves reach the sruns inside by Slurm's own means.
 */
#include "everstep.h"

#include <getopt.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool second_pass;

void allocator_init(void)
{
	second_pass = process_is_second_pass();
	/* Inside a job that we gave --no-kill to: that was meant for that job, not for those submitted from it. */
	if (!second_pass && getenv(VAR_NO_KILL)) {
		unsetenv(VAR_NO_KILL);
		unsetenv("SBATCH_NO_KILL");
		unsetenv("SALLOC_NO_KILL");
	}
}

/* Has sbatch read its script from standard input, where it cannot be read again? */
static bool script_is_gone(char **line, int length)
{
	if (optind < length || words_have_option(line, length, "--wrap"))
		return false;
	return lseek(STDIN_FILENO, 0, SEEK_SET) < 0;
}

int allocator_options_read(void)
{
	struct settings settings = merged(&options_given()->settings, &config.defaults);
	char program[PATH_MAX] = "", **line = NULL;
	int length = 0;
	ssize_t got = 0;
	const char *variable = NULL;
	bool sbatch = false;

	if (!options_given()->here || settings.auto_resume != 1 || second_pass)
		return 0;
	if (!process_allowed(&config)) {
		slurm_error("everstep: --auto-resume is not open to you on this cluster: ask your admins "
			    "(users= and groups= in plugstack.conf), or leave it out");
		exit(EXIT_USAGE);
	}
	if (config.problem[0]) {
		slurm_error("everstep: plugstack.conf is wrong: %s", config.problem);
		exit(EXIT_USAGE);
	}
	got = readlink("/proc/self/exe", program, sizeof(program) - 1);
	if (got <= 0 || !(line = process_words(&length)))
		return 0;
	program[got] = '\0';
	sbatch = strstr(program, "sbatch") != NULL;
	variable = sbatch ? "SBATCH_NO_KILL" : "SALLOC_NO_KILL";
	if (getenv(variable))
		return 0;
	if (sbatch && script_is_gone(line, length)) {
		slurm_error("everstep: WARNING: a script from a pipe is read once, so this job cannot be given "
			    "--no-kill here, and Slurm will kill it when a node dies: add `#SBATCH --no-kill`");
		return 0;
	}
	setenv(variable, "set", 1);
	setenv(VAR_NO_KILL, "1", 1);
	process_replace(program, line);
	return 0;
}
