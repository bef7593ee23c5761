/* The options that srun, sbatch and salloc offer for us. Slurm's own parser reads them, so nothing is guessed. */
#include "everstep.h"

#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>

enum { AUTO_RESUME, STANDBY, SPARE_NODES, RESUME_POLICY };

/* How sbatch and salloc pass --auto-resume on to the sruns inside: Slurm's own name for it. */
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_everstep_auto_resume"

static struct given given = {
	.settings = { .auto_resume = UNSET, .standby = UNSET, .spare_nodes = UNSET },
};
static char policy[WHY_SIZE];
static int times; /* that --auto-resume was read */

static int read_option(int which, const char *text, int remote)
{
	static const char *const names[] = { "auto-resume", "standby", "spare-nodes", "resume-policy" };
	struct settings *settings = &given.settings;
	char why[WHY_SIZE] = "";
	int rc = 0;

	if (remote)
		return 0; /* srun has read them; what a task needs comes in the agents' orders */
	switch (which) {
	case AUTO_RESUME:
		rc = parse_switch(text, &settings->auto_resume, why);
		/* The inherited form, where there is one, is read first. */
		given.here = ++times > (getenv(INHERITED) ? 1 : 0);
		break;
	case STANDBY:
		rc = parse_count(text, &settings->standby, why);
		break;
	case SPARE_NODES:
		rc = parse_count(text, &settings->spare_nodes, why);
		break;
	default:
		rc = parse_policy(text, why);
		snprintf(policy, sizeof(policy), "%s", text ? text : "");
		settings->resume_policy = policy;
	}
	if (rc < 0)
		slurm_error("everstep: --%s: %s", names[which], why);
	return rc;
}

static struct spank_option options[] = {
	{ "auto-resume", "[0|1]",
	  "go on when a worker or a node of this step dies: standbys and spare nodes take over (Everstep)", 2,
	  AUTO_RESUME, read_option },
	{ "standby", "N", "with --auto-resume: standbys kept warm on each node", 1, STANDBY, read_option },
	{ "spare-nodes", "N", "with --auto-resume: so many of the step's nodes stand by until one is lost", 1,
	  SPARE_NODES, read_option },
	{ "resume-policy", "RUNGS",
	  "with --auto-resume: what may be done, of standby,spare,replace,requeue; all (default) or none", 1,
	  RESUME_POLICY, read_option },
};

int options_register(void *spank)
{
	for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
		if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

const struct given *options_given(void)
{
	return &given;
}
