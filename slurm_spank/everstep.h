/* What the plugin's files share. One file a context (local.c, allocator.c, remote.c), one a subject (the others). */
#ifndef EVERSTEP_H
#define EVERSTEP_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* What this plugin and the launcher agree on: `everstep native` and `everstep agent --task` refuse another number. */
#define EVERSTEP_INTERFACE "1"

#ifndef EVERSTEP_PATH
#define EVERSTEP_PATH "/opt/everstep/bin/everstep"
#endif

/* Wrong usage, as everywhere in Everstep (EX_USAGE). */
#define EXIT_USAGE 64

/*
 * Variables that Slurm carries from srun to a step's tasks whatever --export says, since they begin with SLURM. The
 * launcher (launcher/native.py, launcher/task.py) knows them by the same names.
 */
#define VAR_PASS "SLURM_EVERSTEP_PASS"       /* our own second pass through srun or sbatch: the pid, which exec keeps */
#define VAR_ORDERS "SLURM_EVERSTEP_AGENT"    /* the agents' orders: there only where the step is Everstep's */
#define VAR_PATH "SLURM_EVERSTEP_PATH"       /* the everstep that agents are started from */
#define VAR_REPORT "SLURM_EVERSTEP_REPORT"   /* line:HOST:PORT:TOKEN, where srun listens for the run's exit code */
#define VAR_NO_KILL "SLURM_EVERSTEP_NO_KILL" /* this job was given --no-kill by us */

enum { UNSET = -1 };

/* What was asked for, by the user's options or as the site's defaults. */
struct settings {
	int auto_resume; /* 0, 1 or UNSET */
	int standby;     /* UNSET: the launcher's default; so for the next two */
	int spare_nodes;
	const char *resume_policy; /* NULL where unset */
};

/* parse.c: PURE reading of options' values. Each returns 0, or -1 with the reason, in words, in `why`. */
#define WHY_SIZE 256
int parse_switch(const char *text, int *value, char *why);
int parse_count(const char *text, int *value, char *why);
int parse_policy(const char *text, char *why);
struct settings merged(const struct settings *options, const struct settings *defaults);

/* config.c: PURE reading of plugstack.conf's arguments. */
struct config {
	const char *everstep;
	struct settings defaults;
	const char *users;  /* comma-separated, NULL: all */
	const char *groups; /* the same; who is named in neither may not use it where one is given */
	char problem[WHY_SIZE]; /* what is wrong with the line, empty where nothing is */
};
void config_read(struct config *config, int ac, char **av);
bool config_lists(const char *list, const char *name);

/* words.c: PURE handling of command lines and paths. */
char **words_split(char *text, size_t length, int *count);
int words_find_program(const char *program, const char *path, char *found, size_t size,
		       bool (*executable)(const char *path));
bool words_starts_torchrun(const char *program);
int words_everstep_beside(const char *program, const char *path, char *found, size_t size,
			  bool (*executable)(const char *path));
bool words_have_option(char **words, int count, const char *name);

/* options.c: the options that Slurm offers for us, and what was given. */
struct given {
	struct settings settings;
	bool here; /* --auto-resume stands on this very command line, not only on sbatch's or salloc's */
};
int options_register(void *spank);
const struct given *options_given(void);

/* process.c: this process, as the system knows it. */
char **process_words(int *count);
bool process_executable(const char *path);
bool process_is_second_pass(void);
bool process_allowed(const struct config *config);
void process_replace(const char *program, char **words);

/* ear.c: how srun hears the run's exit code. */
int ear_open(void);
int ear_close(void);
int ear_parse(const char *line, const char *token, int *code);
int ear_tell(const char *report, int code);

/* One function a context and phase; plugin.c calls them. They return 0, or -1 where Slurm is to stop. */
extern struct config config;
void local_init(void);
int local_options_read(void);
int local_step_made(void);
void local_exit(void);
void allocator_init(void);
int allocator_options_read(void);
int remote_task(void *spank);

#endif
