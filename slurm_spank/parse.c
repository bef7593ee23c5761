/* PURE reading of options' values, on the command line and in plugstack.conf alike. */
#include "everstep.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Slurm writes "(null)" for an option without its value where it passes it on to a job's sruns. */
static bool is_bare(const char *text)
{
	return !text || !*text || strcmp(text, "(null)") == 0;
}

int parse_switch(const char *text, int *value, char *why)
{
	if (is_bare(text) || strcmp(text, "1") == 0) {
		*value = 1;
		return 0;
	}
	if (strcmp(text, "0") == 0) {
		*value = 0;
		return 0;
	}
	snprintf(why, WHY_SIZE, "0 or 1 is wanted, not '%.64s'", text);
	return -1;
}

int parse_count(const char *text, int *value, char *why)
{
	char *end = NULL;
	long number = -1;

	if (text && *text >= '0' && *text <= '9')
		number = strtol(text, &end, 10);
	if (number < 0 || number > 65535 || !end || *end) {
		snprintf(why, WHY_SIZE, "a whole number, 0 or more, is wanted, not '%.64s'", text ? text : "");
		return -1;
	}
	*value = (int)number;
	return 0;
}

int parse_policy(const char *text, char *why)
{
	static const char *const rungs[] = { "standby", "spare", "replace", "requeue" };
	const char *at = text ? text : "";

	if (strcmp(at, "all") == 0 || strcmp(at, "none") == 0)
		return 0;
	while (true) {
		size_t length = strcspn(at, ",");
		bool known = false;

		for (size_t i = 0; i < sizeof(rungs) / sizeof(rungs[0]); i++)
			known |= strlen(rungs[i]) == length && strncmp(rungs[i], at, length) == 0;
		if (!known) {
			snprintf(why, WHY_SIZE,
				 "all, none, or some of standby,spare,replace,requeue are wanted, not '%.64s'",
				 text ? text : "");
			return -1;
		}
		if (!at[length])
			return 0;
		at += length + 1;
	}
}

struct settings merged(const struct settings *options, const struct settings *defaults)
{
	struct settings all = *options;

	if (all.auto_resume == UNSET)
		all.auto_resume = defaults->auto_resume;
	if (all.standby == UNSET)
		all.standby = defaults->standby;
	if (all.spare_nodes == UNSET)
		all.spare_nodes = defaults->spare_nodes;
	if (!all.resume_policy)
		all.resume_policy = defaults->resume_policy;
	return all;
}
