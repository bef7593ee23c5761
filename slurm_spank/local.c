/*
 * srun, before and after its step.
 *
 * Once Slurm has read the options, and before it has asked for anything, `everstep native` takes srun's place. It
 * checks the line as `everstep srun` does, and puts srun back in its own place (the pid stays) with the switches that
 * keep the step alive and with the agents' orders in its environment. That second srun makes the step; here it also
 * listens for the run's exit code. An srun without --auto-resume gets no further than the first `if`.
 */
#include "everstep.h"

#include <getopt.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static bool second_pass, listening;
static int told = -1;
static pid_t told_in;

void local_init(void)
{
	second_pass = process_is_second_pass();
}

static void stop(const char *problem, const char *cure)
{
	slurm_error("everstep: %s%s%s", problem, cure ? ": " : "", cure ? cure : "");
	exit(EXIT_USAGE); /* also where plugstack.conf calls us optional */
}

static void add(char **words, int *count, const char *name, const char *value)
{
	words[(*count)++] = (char *)name;
	words[(*count)++] = (char *)value;
}

static void plan(const struct settings *settings, char **line, int length, int command_at)
{
	static char path[PATH_MAX], program[PATH_MAX], at[16], standby[16], spare_nodes[16];
	const char *everstep = config.everstep;
	char **words = calloc((size_t)length + 32, sizeof(*words));
	int count = 0;
	ssize_t got = readlink("/proc/self/exe", program, sizeof(program) - 1);

	if (!words || got <= 0) {
		free(words);
		stop("srun cannot find itself under /proc", NULL);
		return;
	}
	program[got] = '\0';
	if (words_everstep_beside(line[command_at], getenv("PATH"), path, sizeof(path), process_executable) == 0)
		everstep = path;
	else if (!process_executable(everstep)) {
		snprintf(path, sizeof(path), "%s is not here or cannot be executed", everstep);
		free(words);
		stop(path, "ask your admins (everstep= in plugstack.conf), or leave --auto-resume out");
		return;
	}
	snprintf(at, sizeof(at), "%d", command_at);
	snprintf(standby, sizeof(standby), "%d", settings->standby);
	snprintf(spare_nodes, sizeof(spare_nodes), "%d", settings->spare_nodes);
	words[count++] = (char *)everstep;
	words[count++] = (char *)"native";
	add(words, &count, "--interface", EVERSTEP_INTERFACE);
	add(words, &count, "--program", program);
	add(words, &count, "--command-at", at);
	if (!options_given()->here)
		words[count++] = (char *)"--inherited";
	if (settings->standby != UNSET)
		add(words, &count, "--standby", standby);
	if (settings->spare_nodes != UNSET)
		add(words, &count, "--spare-nodes", spare_nodes);
	if (settings->resume_policy)
		add(words, &count, "--resume-policy", settings->resume_policy);
	words[count++] = (char *)"--";
	for (int i = 0; i < length; i++)
		words[count++] = line[i];
	process_replace(everstep, words);
	free(words);
	exit(EXIT_USAGE);
}

int local_options_read(void)
{
	struct settings settings = merged(&options_given()->settings, &config.defaults);
	char **line = NULL;
	int length = 0, command_at = optind;

	if (settings.auto_resume != 1 || second_pass)
		return 0;
	if (!process_allowed(&config)) {
		if (options_given()->here)
			stop("--auto-resume is not open to you on this cluster",
			     "ask your admins (users= and groups= in plugstack.conf), or leave it out");
		return 0;
	}
	if (config.problem[0])
		stop("plugstack.conf is wrong", config.problem);
	if (!(line = process_words(&length)))
		stop("srun cannot read its own command line under /proc", NULL);
	/* A shell that Slurm itself starts (salloc's interactive step) is nobody's training run. */
	if (!line || command_at < 1 || command_at >= length || words_have_option(line, command_at, "--interactive"))
		return 0;
	plan(&settings, line, length, command_at);
	return -1;
}

int local_step_made(void)
{
	if (!second_pass || !getenv(VAR_ORDERS))
		return 0;
	if (ear_open() < 0)
		slurm_error("everstep: srun cannot listen for the run's exit code: it will end with Slurm's own");
	else
		listening = true;
	return 0;
}

void local_exit(void)
{
	if (listening) {
		told = ear_close();
		told_in = getpid();
	}
	listening = false;
}

/*
 * srun's own code says nothing of a run that lost a node, so the run's is put in its place at the very end: the job is
 * given back by then and all plugins have had their slurm_spank_exit.
 */
__attribute__((destructor)) static void end_with_the_runs_code(void)
{
	if (told < 0 || told_in != getpid())
		return;
	fflush(NULL);
	_exit(told);
}
